#pragma once

#include <pybind11/pybind11.h>

#include <tuple>
#include <utility>

#include "engine/context/context_options.hpp"

namespace llamatap::bind {

/// A member of an options struct and its keyword in Python.
template <typename Options, typename Type>
struct Option {
  const char* name;
  Type Options::* member;
};
template <typename Options, typename Type>
Option(const char*, Type Options::*) -> Option<Options, Type>;

/// A function of (first..., the value of each option...) that calls make(first..., Options).
template <typename... First, typename Options, typename Make, typename... Types>
auto with_options(const std::tuple<Option<Options, Types>...>& options, Make make) {
  return [options, make](const First&... first, Types... values) {
    Options given;
    std::apply(
        [&](const Option<Options, Types>&... option) { ((given.*option.member = std::move(values)), ...); },
        options);
    return make(first..., given);
  };
}

/// Calls define(py::arg...) with the keywords of the options.
template <typename Define, typename... Options, typename... Types>
void def_with_options(const std::tuple<Option<Options, Types>...>& options, const Define& define) {
  std::apply([&](const auto&... option) { define(pybind11::arg(option.name)...); }, options);
}

/// The context options of a draft context; other contexts take kContextOptions.
inline constexpr std::tuple kDraftContextOptions{
    Option{"n_ctx", &ContextOptions::n_ctx},
    Option{"n_batch", &ContextOptions::n_batch},
    Option{"n_ubatch", &ContextOptions::n_ubatch},
    Option{"n_seq_max", &ContextOptions::n_seq_max},
    Option{"n_threads", &ContextOptions::n_threads},
    Option{"type_k", &ContextOptions::type_k},
    Option{"type_v", &ContextOptions::type_v},
    Option{"flash_attention", &ContextOptions::flash_attention},
    Option{"kv_unified", &ContextOptions::kv_unified},
    Option{"memory_available", &ContextOptions::memory_available},
};

}  // namespace llamatap::bind
