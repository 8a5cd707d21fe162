// The pretended device: what the other files share.
//
//   memory.cpp       blocks of device memory and page-locked memory
//   kernels.cpp      every operator, run by the CPU's kernel
//   streams.cpp      current device and stream, streams and events
//   hooks.cpp        what torch asks "is there a CUDA, and what can it do"
//   collectives.cpp  a process group with NCCL's use of streams, over gloo
//   observer.cpp     everything that happens, passed to one Python object
//   module.cpp       the Python module
//
// Nothing runs asynchronously here, except sends and receives. An operator has been computed when its call returns. The observer
// judges what a real device may do later: it gets the order of the requests.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <string>
#include <utility>
#include <vector>

namespace pretended {

// ------------------------------------------------------------------------------------------------------------ devices

constexpr int MAX_DEVICES = 8;

// Both kinds exist; tests use one of them.
inline bool is_device(c10::DeviceType type) { return type == c10::DeviceType::CUDA || type == c10::DeviceType::HPU; }
inline bool is_device(const at::Tensor& tensor) { return tensor.defined() && is_device(tensor.device().type()); }

int device_count();
void set_device_count(int count);
c10::DeviceIndex current_device();             // of this thread
void set_current_device(c10::DeviceIndex index);
int64_t current_stream(c10::DeviceIndex index);  // of this thread, on that device
void set_current_stream(c10::DeviceIndex index, int64_t stream);

// A number for a stream that no other stream of any device has. 0 to 7 are the default streams.
inline int64_t stream_key(c10::DeviceIndex device, int64_t stream) { return stream * MAX_DEVICES + device; }
inline int64_t stream_key(const c10::Stream& stream) { return stream_key(stream.device_index(), stream.id()); }
int64_t new_stream();
int64_t new_event();

// ------------------------------------------------------------------------------------------------------------- memory

// The context of a block of device memory. `host` holds its bytes; its address as device memory is another one.
struct Block {
  c10::Storage host;
  int64_t id;  // of no other block
};

// (id of a block, first byte, byte after the last) that an operator reads or writes.
struct Range {
  int64_t block, from, to;
};

// (id, bytes) of a new block.
using Made = std::vector<std::pair<int64_t, int64_t>>;

c10::Allocator* device_allocator(c10::DeviceType type);
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);
Block* block_of(const c10::DataPtr& pointer);                                // null if it is no device memory
c10::Storage on_device(const c10::Storage& host, c10::Device device, Made& made);  // the same bytes, as device memory
void host_bytes_moved(const c10::Storage& storage);  // after the host storage of a block was resized
at::Tensor host_alias(const at::Tensor& tensor);     // the same bytes, as a tensor of the CPU
Range range_of(const at::Tensor& tensor);
std::vector<int64_t> take_freed();  // ids of blocks that were freed since the last call

// ----------------------------------------------------------------------------------------------------------- observer

// Each calls the Python object of set_observer. They do nothing without one.
struct Launch {
  std::string name;
  int64_t stream = 0;
  std::vector<Range> reads, writes;
  Made made;
  bool waits = false;     // the host waits for the result
  std::string arguments;  // all that is no tensor, and the shapes of tensors; only if asked for
};
void tell_launch(const Launch& launch);
void tell_view(const Launch& launch);
void tell_made(const Launch& launch);
void tell_copy(const Launch& launch, bool to_device, bool blocks, int64_t bytes, const at::Tensor& host);
void tell_collective(const std::string& name, int64_t stream, const std::vector<Range>& reads, const std::vector<Range>& writes);
void tell_record(int64_t event, int64_t stream);
void tell_wait(int64_t event, int64_t stream);  // of a stream, for an event
void tell_synchronise(const char* what, int64_t number);
bool ask_event(int64_t event);
void tell_announcement(int64_t block, int64_t stream);  // record_stream
bool wants_arguments();

}  // namespace pretended
