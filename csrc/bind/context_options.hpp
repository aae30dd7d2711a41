#pragma once

#include <pybind11/pybind11.h>

#include <tuple>
#include <utility>

#include "bind/gil.hpp"
#include "engine/context/context_options.hpp"

namespace llamatap::bind {

/// An option of a context and its keyword in Python.
template <typename Type>
struct Option {
  const char* name;
  Type ContextOptions::* member;
};
template <typename Type>
Option(const char*, Type ContextOptions::*) -> Option<Type>;

/// The options of contexts: their only list in the binding. Draft contexts take these, others all of them.
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
inline constexpr auto kContextOptions =
    std::tuple_cat(kDraftContextOptions, std::tuple{
                                             Option{"n_rs_seq", &ContextOptions::n_rs_seq},
                                             Option{"n_outputs_max", &ContextOptions::n_outputs_max},
                                             Option{"swa_full", &ContextOptions::swa_full},
                                         });

/// Binds __init__(first..., **options) to make(first..., ContextOptions), which runs without the GIL.
/// `extra`: the names of the first arguments.
template <typename... First, typename Class, typename Make, typename... Types, typename... Extra>
void def_init(Class& bound, const std::tuple<Option<Types>...>& options, Make make, const Extra&... extra) {
  const auto init = [options, make](const First&... first, Types... values) {
    ContextOptions given;
    std::apply([&](const Option<Types>&... option) { ((given.*option.member = std::move(values)), ...); },
               options);
    const GilReleased released;
    return make(first..., given);
  };
  std::apply(
      [&](const Option<Types>&... option) { bound.def(py::init(init), extra..., py::arg(option.name)...); },
      options);
}

}  // namespace llamatap::bind
