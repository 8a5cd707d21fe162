// Answers to torch's questions to the CUDA library: presence, generators and allocators.
#include "device.h"
#include "random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <array>

namespace pretended {

at::Generator& generator(c10::DeviceIndex index) {
  static std::array<at::Generator, MAX_DEVICES> generators = [] {
    std::array<at::Generator, MAX_DEVICES> made;
    for (auto& one : made) one = at::detail::createCPUGenerator();
    return made;
  }();
  return generators[index < 0 ? current_device() : index];
}

namespace {

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return generator(index); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(c10::DeviceType::CUDA); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  int getNumGPUs() const override { return device_count(); }
  c10::DeviceIndex current_device() const override { return pretended::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return pretended::current_device(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto old = pretended::current_device();
    set_current_device(index);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  void deviceSynchronize(c10::DeviceIndex index) const override { tell_synchronise("device", index); }
};

}  // namespace

// torch made its own hooks, which say that there is no CUDA, when it was imported. They have no data: they become ours by
// their table of functions.
void become_cuda() {
  const auto& hooks = at::detail::getCUDAHooks();
  if (hooks.hasCUDA()) return;
  static Hooks ours{at::CUDAHooksArgs{}};
  *reinterpret_cast<void**>(const_cast<at::CUDAHooksInterface*>(&hooks)) = *reinterpret_cast<void**>(&ours);
}

}  // namespace pretended
