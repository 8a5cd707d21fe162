// Device memory: bytes of the host behind an address that faults. Page-locked memory: bytes of the host that are remembered.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace pretended {
namespace {

// No process has memory there, on x86-64 or aarch64: who follows a device's pointer on the host dies of it, as on a GPU.
constexpr uint64_t NOT_HERE = 1ull << 54;

std::atomic<int64_t> next_block{1};
std::mutex freed_mutex;
std::vector<int64_t> freed;

void* device_address(const void* host) {
  return host ? reinterpret_cast<void*>(reinterpret_cast<uint64_t>(host) ^ NOT_HERE) : nullptr;
}

// Only notes it: the last reference may go where nobody may call Python.
void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> guard(freed_mutex);
    freed.push_back(block->id);
  }
  delete block;
}

struct DeviceAllocator final : c10::Allocator {
  explicit DeviceAllocator(c10::DeviceType type) : type(type) {}
  c10::DeviceType type;
  c10::DataPtr allocate(size_t bytes) override {
    auto data = c10::GetCPUAllocator()->allocate(bytes);
    void* address = device_address(data.get());
    c10::Storage host(c10::Storage::use_byte_size_t(), bytes, std::move(data), c10::GetCPUAllocator(), true);
    auto* block = new Block{std::move(host), next_block++};
    return {address, block, &free_block, c10::Device(type, current_device())};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "the device copies through operators"); }
};

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned;  // start and bytes

struct PinnedAllocator final : c10::Allocator {
  static void release(void* pointer) {
    {
      std::lock_guard<std::mutex> guard(pinned_mutex);
      pinned.erase(static_cast<char*>(pointer));
    }
    std::free(pointer);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = nullptr;
    TORCH_CHECK(posix_memalign(&pointer, 64, bytes ? bytes : 1) == 0, "no memory");
    std::lock_guard<std::mutex> guard(pinned_mutex);
    pinned[static_cast<char*>(pointer)] = bytes;
    return {pointer, pointer, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

c10::Allocator* device_allocator(c10::DeviceType type) {
  static DeviceAllocator cuda(c10::DeviceType::CUDA), hpu(c10::DeviceType::HPU);
  return type == c10::DeviceType::CUDA ? &cuda : &hpu;
}

c10::Allocator* pinned_allocator() {
  static PinnedAllocator allocator;
  return &allocator;
}

bool is_pinned(const void* pointer) {
  const auto* address = static_cast<const char*>(pointer);
  std::lock_guard<std::mutex> guard(pinned_mutex);
  auto after = pinned.upper_bound(address);
  if (after == pinned.begin()) return false;
  const auto& [start, bytes] = *--after;
  return address < start + std::max<size_t>(bytes, 1);
}

Block* block_of(const c10::DataPtr& pointer) {
  return pointer.get_deleter() == &free_block ? static_cast<Block*>(pointer.get_context()) : nullptr;
}

c10::Storage on_device(const c10::Storage& host, c10::Device device, Made& made) {
  auto* block = new Block{host, next_block++};
  made.emplace_back(block->id, static_cast<int64_t>(host.nbytes()));
  c10::DataPtr pointer(device_address(host.data()), block, &free_block, device);
  return {c10::Storage::use_byte_size_t(), host.nbytes(), std::move(pointer), device_allocator(device.type()), true};
}

void host_bytes_moved(const c10::Storage& storage) {
  auto* implementation = storage.unsafeGetStorageImpl();
  auto* block = block_of(storage.data_ptr());
  if (implementation->nbytes() == block->host.nbytes()) return;
  c10::DataPtr pointer(device_address(block->host.data()), block, &free_block, storage.device());
  implementation->set_data_ptr(std::move(pointer)).release_context();  // the block stays
  implementation->set_nbytes(block->host.nbytes());
}

at::Tensor host_alias(const at::Tensor& tensor) {
  auto* block = block_of(tensor.storage().data_ptr());
  TORCH_CHECK(block, "a tensor of the device has memory that the device did not give");
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(block->host), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* implementation = alias.unsafeGetTensorImpl();
  implementation->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) implementation->set_wrapped_number(true);
  return alias;
}

Range range_of(const at::Tensor& tensor) {
  const int64_t item = tensor.dtype().itemsize();
  int64_t first = tensor.storage_offset(), last = first;
  const int64_t block = block_of(tensor.storage().data_ptr())->id;
  if (tensor.numel() == 0) return {block, first * item, first * item};
  for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {block, first * item, (last + 1) * item};
}

std::vector<int64_t> take_freed() {
  std::vector<int64_t> taken;
  std::lock_guard<std::mutex> guard(freed_mutex);
  taken.swap(freed);
  return taken;
}

}  // namespace pretended
