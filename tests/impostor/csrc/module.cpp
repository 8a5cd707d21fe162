// The Python module. install() of device.py is the way to use it.
#include "device.h"
#include "observer.h"
#include "random.h"

#include <torch/csrc/utils/pybind.h>

using namespace pretended;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("become_cuda", &become_cuda);
  module.def("set_observer", &set_observer);
  module.def("want_arguments", &want_arguments);
  module.def("set_device_count", &set_device_count);
  module.def("device_count", &device_count);
  module.def("current_device", [] { return static_cast<int>(current_device()); });
  module.def("set_current_device", [](int index) { set_current_device(static_cast<c10::DeviceIndex>(index)); });
  // (device, stream), of this thread
  module.def("current_stream", [](int index) { return current_stream(static_cast<c10::DeviceIndex>(index)); });
  module.def("set_current_stream", [](int index, int64_t stream) { set_current_stream(static_cast<c10::DeviceIndex>(index), stream); });
  module.def("generator", [](int index) { return generator(static_cast<c10::DeviceIndex>(index)); });
  module.def("host_alias", &host_alias);
  module.def("block_of", [](const at::Tensor& tensor) { return range_of(tensor).block; });
  module.attr("MAX_DEVICES") = MAX_DEVICES;
  add_process_group(module);
}
