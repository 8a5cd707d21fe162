// Current device and stream of each thread; streams and events as torch asks for them. They only keep account.
#include "device.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

namespace pretended {
namespace {

int devices = 1;
thread_local c10::DeviceIndex device = 0;
thread_local int64_t streams[MAX_DEVICES] = {};
std::atomic<int64_t> next_stream{1}, next_event{1};

// An event as torch holds it: a pointer to its number.
int64_t number(void* event) { return *static_cast<int64_t*>(event); }

template <c10::DeviceType TYPE>
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(c10::DeviceIndex index, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, index), id);
  }
  static c10::DeviceIndex index_of(c10::Device wanted) { return wanted.has_index() ? wanted.index() : current_device(); }

  c10::DeviceType type() const override { return TYPE; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(devices); }
  c10::Device getDevice() const override { return c10::Device(TYPE, device); }
  c10::Device exchangeDevice(c10::Device wanted) const override {
    c10::Device old(TYPE, device);
    set_current_device(wanted.index());
    return old;
  }
  void setDevice(c10::Device wanted) const override { set_current_device(wanted.index()); }
  void uncheckedSetDevice(c10::Device wanted) const noexcept override { device = wanted.index(); }

  c10::Stream getStream(c10::Device of) const override { return stream(index_of(of), streams[index_of(of)]); }
  c10::Stream getDefaultStream(c10::Device of) const override { return stream(index_of(of), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override { return stream(index_of(of), new_stream()); }
  c10::Stream getNewStream(c10::Device of, int) const override { return stream(index_of(of), new_stream()); }
  c10::Stream exchangeStream(c10::Stream wanted) const override {
    auto old = stream(wanted.device_index(), streams[wanted.device_index()]);
    streams[wanted.device_index()] = wanted.id();
    return old;
  }
  bool queryStream(const c10::Stream& of) const override {
    int64_t event = new_event();
    tell_record(event, stream_key(of));
    return ask_event(event);
  }
  void synchronizeStream(const c10::Stream& of) const override { tell_synchronise("stream", stream_key(of)); }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new int64_t(new_event());
    tell_record(number(*event), stream_key(on));
  }
  void block(void* event, const c10::Stream& waiting) const override {
    if (event) tell_wait(number(event), stream_key(waiting));
  }
  bool queryEvent(void* event) const override { return !event || ask_event(number(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) tell_synchronise("event", number(event));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override { tell_synchronise("device", index); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<int64_t*>(event); }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }  // milliseconds; there is no time here

  // Autograd announces gradients so, where backward runs on another stream than forward.
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& used_on) const override {
    if (auto* block = block_of(data)) tell_announcement(block->id, stream_key(used_on));
  }
};

using CudaGuard = Guard<c10::DeviceType::CUDA>;
using HpuGuard = Guard<c10::DeviceType::HPU>;
c10::impl::DeviceGuardImplRegistrar cuda_guard(c10::DeviceType::CUDA, new CudaGuard());
c10::impl::DeviceGuardImplRegistrar hpu_guard(c10::DeviceType::HPU, new HpuGuard());

}  // namespace

int device_count() { return devices; }
void set_device_count(int count) {
  TORCH_CHECK(count >= 1 && count <= MAX_DEVICES, "1 to ", MAX_DEVICES, " devices");
  devices = count;
}
c10::DeviceIndex current_device() { return device; }
void set_current_device(c10::DeviceIndex index) {
  TORCH_CHECK(index < devices, "CUDA error: invalid device ordinal");
  if (index >= 0) device = index;
}
int64_t current_stream(c10::DeviceIndex index) { return streams[index]; }
void set_current_stream(c10::DeviceIndex index, int64_t stream) { streams[index] = stream; }
int64_t new_stream() { return next_stream++; }
int64_t new_event() { return next_event++; }

}  // namespace pretended
