#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "engine/error.hpp"

namespace llamatap::bind {

/// Python or NumPy integer, clamped to int64, so that range checks report it. Rejects bool and float.
struct Integer {
  int64_t value = 0;
};

/// Token ids. Anything else raises InvalidInputError, with what was expected, instead of pybind11's
/// TypeError.
struct TokenIds {
  std::vector<Integer> ids;
};

}  // namespace llamatap::bind

namespace pybind11::detail {

template <>
struct type_caster<llamatap::bind::Integer> {
  PYBIND11_TYPE_CASTER(llamatap::bind::Integer, const_name("typing.SupportsIndex"));

  bool load(handle source, bool) {
    if (!source || PyBool_Check(source.ptr()) || !PyIndex_Check(source.ptr())) return false;
    const auto number = reinterpret_steal<object>(PyNumber_Index(source.ptr()));
    if (!number) {
      PyErr_Clear();
      return false;
    }
    int overflow = 0;
    const long long found = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    value.value = overflow > 0   ? std::numeric_limits<int64_t>::max()
                  : overflow < 0 ? std::numeric_limits<int64_t>::min()
                                 : int64_t{found};
    return true;
  }

  static handle cast(const llamatap::bind::Integer& source, return_value_policy, handle) {
    return PyLong_FromLongLong(source.value);
  }
};

template <>
struct type_caster<llamatap::bind::TokenIds> {
  PYBIND11_TYPE_CASTER(llamatap::bind::TokenIds,
                       const_name("collections.abc.Sequence[typing.SupportsIndex]"));

  bool load(handle source, bool convert) {
    make_caster<std::vector<llamatap::bind::Integer>> caster;
    if (!caster.load(source, convert)) {
      throw llamatap::InvalidInput(
          "tokens must be a list or an array of integers, such as model.tokenize(text) gives, not " +
          module_::import("reprlib").attr("repr")(source).cast<std::string>());
    }
    value.ids = cast_op<std::vector<llamatap::bind::Integer>&&>(std::move(caster));
    return true;
  }
};

}  // namespace pybind11::detail
