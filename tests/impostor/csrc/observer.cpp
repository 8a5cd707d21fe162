// Reports events to one Python object, by methods of these names. Its exceptions reach the caller of the operator.
#include "device.h"
#include "observer.h"

#include <torch/csrc/utils/pybind.h>

namespace pretended {
namespace {

PyObject* observer = nullptr;  // never freed: it may be called while Python ends
bool arguments_wanted = false;

py::list ranges(const std::vector<Range>& all) {
  py::list list;
  for (const auto& one : all) list.append(py::make_tuple(one.block, one.from, one.to));
  return list;
}

// Calls a method, after it has reported the blocks that were freed before.
template <class... Arguments>
py::object tell(const char* method, Arguments&&... arguments) {
  const auto freed = take_freed();
  auto object = py::reinterpret_borrow<py::object>(observer);
  if (!freed.empty()) object.attr("freed")(py::cast(freed));
  return object.attr(method)(std::forward<Arguments>(arguments)...);
}

bool deaf() { return !observer || !Py_IsInitialized(); }

py::list made(const Launch& launch) {
  py::list list;
  for (const auto& [block, bytes] : launch.made) list.append(py::make_tuple(block, bytes));
  return list;
}

}  // namespace

void set_observer(py::object object) { observer = object.is_none() ? nullptr : object.release().ptr(); }
void want_arguments(bool wanted) { arguments_wanted = wanted; }
bool wants_arguments() { return arguments_wanted; }

void tell_made(const Launch& launch) {
  if (deaf() || launch.made.empty()) return;
  py::gil_scoped_acquire gil;
  tell("made", launch.stream, made(launch));
}

void tell_launch(const Launch& launch) {
  if (deaf()) return;
  tell_made(launch);
  py::gil_scoped_acquire gil;
  tell("launched", launch.name, launch.stream, ranges(launch.reads), ranges(launch.writes), launch.waits, launch.arguments);
}

void tell_view(const Launch& launch) {
  if (deaf() || !arguments_wanted) return;
  py::gil_scoped_acquire gil;
  tell("viewed", launch.name, launch.arguments);
}

void tell_copy(const Launch& launch, bool to_device, bool blocks, int64_t bytes, const at::Tensor& host) {
  if (deaf()) return;
  tell_made(launch);
  py::gil_scoped_acquire gil;
  tell("copied", launch.name, launch.stream, ranges(launch.reads), ranges(launch.writes), to_device, blocks, bytes,
       py::cast(host), launch.arguments);
}

void tell_collective(const std::string& name, int64_t stream, const std::vector<Range>& reads, const std::vector<Range>& writes) {
  if (deaf()) return;
  py::gil_scoped_acquire gil;
  tell("exchanged", name, stream, ranges(reads), ranges(writes));
}

void tell_record(int64_t event, int64_t stream) {
  if (deaf()) return;
  py::gil_scoped_acquire gil;
  tell("recorded", event, stream);
}

void tell_wait(int64_t event, int64_t stream) {
  if (deaf()) return;
  py::gil_scoped_acquire gil;
  tell("waited", event, stream);
}

void tell_synchronise(const char* what, int64_t number) {
  if (deaf()) return;
  py::gil_scoped_acquire gil;
  tell("synchronised", what, number);
}

bool ask_event(int64_t event) {
  if (deaf()) return true;
  py::gil_scoped_acquire gil;
  return tell("queried", event).cast<bool>();
}

void tell_announcement(int64_t block, int64_t stream) {
  if (deaf()) return;
  py::gil_scoped_acquire gil;
  tell("announced", block, stream);
}

}  // namespace pretended
