// For module.cpp.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pretended {
void set_observer(py::object object);
void want_arguments(bool wanted);
void add_process_group(py::module_& module);
}  // namespace pretended
