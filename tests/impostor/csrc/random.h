// The generator of random numbers of each device. It draws as a CPU's does: with its seed, the same numbers.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace pretended {
at::Generator& generator(c10::DeviceIndex index);
void become_cuda();
}  // namespace pretended
