// A process group of the device that uses streams as NCCL does, over a gloo group of the same ranks.
//
// A collective waits on a stream of its own for the stream that asks for it. Work.wait() lets the stream that calls it wait
// for the collective; the host goes on. The bytes move when the collective is asked for, so that ranks who ask in different
// orders hang. Sends and receives move theirs between the call and the wait.
#include "device.h"
#include "observer.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace pretended {
namespace {

using c10::intrusive_ptr;
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using Handle = intrusive_ptr<c10d::Work>;
using Future = intrusive_ptr<c10::ivalue::Future>;

struct Begun final : c10d::Work {
  Begun(Handle inner, int64_t end, c10::DeviceIndex device, Tensors used, bool arrived, Future future)
      : inner(std::move(inner)), end(end), device(device), used(std::move(used)), arrived(arrived), future(std::move(future)) {}
  Handle inner;
  int64_t end;  // the event after it
  c10::DeviceIndex device;
  Tensors used;  // kept until somebody waits, as NCCL's work does
  bool arrived;
  Future future;

  Future getFuture() override { return future ? future : Work::getFuture(); }
  bool isCompleted() override {
    if (!arrived && !inner->isCompleted()) return false;
    return ask_event(end);
  }
  bool isSuccess() const override { return true; }
  void synchronize() override { wait(std::chrono::milliseconds(0)); }
  bool wait(std::chrono::milliseconds timeout) override {
    if (!arrived) inner->wait(timeout);
    arrived = true;
    tell_wait(end, stream_key(device, current_stream(device)));
    used.clear();
    return true;
  }
};

Tensors flat(const Lists& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}
Tensors on_host(const Tensors& tensors) {
  Tensors all;
  for (const auto& tensor : tensors) all.push_back(host_alias(tensor));
  return all;
}
Lists on_host(const Lists& lists) {
  Lists all;
  for (const auto& list : lists) all.push_back(on_host(list));
  return all;
}

class Group final : public c10d::Backend {
 public:
  explicit Group(intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)), stream_(new_stream()) {}
  const std::string getBackendName() const override { return "nccl"; }

  Handle broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return begin("broadcast", {}, tensors, [&, host = on_host(tensors)]() mutable { return inner_->broadcast(host, options); });
  }
  Handle allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return begin("allreduce", tensors, tensors, [&, host = on_host(tensors)]() mutable { return inner_->allreduce(host, options); });
  }
  Handle allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return begin("allreduce", tensors, tensors, [&] {
      return one_by_one(tensors.size(), [&](size_t k) {
        Tensors host{host_alias(tensors[k])};
        return inner_->allreduce(host, options);
      });
    });
  }
  Handle reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return begin("reduce", tensors, tensors, [&, host = on_host(tensors)]() mutable { return inner_->reduce(host, options); });
  }
  Handle allgather(Lists& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    return begin("allgather", in, flat(out), [&, to = on_host(out), from = on_host(in)]() mutable {
      return inner_->allgather(to, from, options);
    });
  }
  Handle _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    return begin("allgather", {in}, {out}, [&, to = host_alias(out), from = host_alias(in)]() mutable {
      return inner_->_allgather_base(to, from, options);
    });
  }
  Handle allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    return begin("allgather", in, out, [&] {
      return one_by_one(out.size(), [&](size_t k) {
        auto to = host_alias(out[k]), from = host_alias(in[k]);
        return inner_->_allgather_base(to, from, options);
      });
    });
  }
  Handle gather(Lists& out, Tensors& in, const c10d::GatherOptions& options) override {
    return begin("gather", in, flat(out), [&, to = on_host(out), from = on_host(in)]() mutable { return inner_->gather(to, from, options); });
  }
  Handle scatter(Tensors& out, Lists& in, const c10d::ScatterOptions& options) override {
    return begin("scatter", flat(in), out, [&, to = on_host(out), from = on_host(in)]() mutable { return inner_->scatter(to, from, options); });
  }
  Handle reduce_scatter(Tensors& out, Lists& in, const c10d::ReduceScatterOptions& options) override {
    return begin("reduce_scatter", flat(in), out, [&, to = on_host(out), from = on_host(in)]() mutable {
      return inner_->reduce_scatter(to, from, options);
    });
  }
  Handle _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    return begin("reduce_scatter", {in}, {out}, [&, to = host_alias(out), from = host_alias(in)]() mutable {
      return inner_->_reduce_scatter_base(to, from, options);
    });
  }
  Handle reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
    return begin("reduce_scatter", in, out, [&] {
      return one_by_one(out.size(), [&](size_t k) {
        auto to = host_alias(out[k]), from = host_alias(in[k]);
        return inner_->_reduce_scatter_base(to, from, options);
      });
    });
  }
  Handle alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                     const c10d::AllToAllOptions& options) override {
    return begin("alltoall", {in}, {out}, [&, to = host_alias(out), from = host_alias(in)]() mutable {
      return inner_->alltoall_base(to, from, out_sizes, in_sizes, options);
    });
  }
  Handle alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& options) override {
    return begin("alltoall", in, out, [&, to = on_host(out), from = on_host(in)]() mutable { return inner_->alltoall(to, from, options); });
  }
  Handle send(Tensors& tensors, int to, int tag) override {
    return begin("send", tensors, {}, [&, host = on_host(tensors)]() mutable { return inner_->send(host, to, tag); }, false);
  }
  Handle recv(Tensors& tensors, int from, int tag) override {
    return begin("recv", {}, tensors, [&, host = on_host(tensors)]() mutable { return inner_->recv(host, from, tag); }, false);
  }
  // NCCL's is an all-reduce that the host waits for.
  Handle barrier(const c10d::BarrierOptions& options) override {
    tell_synchronise("device", current_device());
    return inner_->barrier(options);
  }

 private:
  intrusive_ptr<c10d::Backend> inner_;
  int64_t stream_;
  int device_ = -1;  // that of the first collective

  // Moves the bytes by `move` as a collective that reads and writes these tensors; `at_once`: before it returns.
  template <class Move>
  Handle begin(const char* name, const Tensors& reads, const Tensors& writes, Move move, bool at_once = true) {
    std::vector<Range> read, written;
    Tensors used;
    for (const auto& [tensors, ranges] : {std::pair{&reads, &read}, std::pair{&writes, &written}})
      for (const auto& tensor : *tensors) {
        check(tensor);
        ranges->push_back(range_of(tensor));
        used.push_back(tensor);
      }
    const auto device = static_cast<c10::DeviceIndex>(device_);
    const int64_t start = new_event(), end = new_event(), own = stream_key(device, stream_);
    tell_record(start, stream_key(device, current_stream(device)));
    tell_wait(start, own);
    Handle work = move();
    if (at_once) work->wait();
    tell_collective(name, own, read, written);
    tell_record(end, own);
    Future future;
    if (at_once) {  // its value is there after the collective, on whatever stream it is waited for
      const auto type = c10::ListType::create(c10::TensorType::get());
      future = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<c10::Device>{used.front().device()});
      const auto current = current_stream(device);
      set_current_stream(device, stream_);
      future->markCompleted(c10::IValue(writes));
      set_current_stream(device, current);
    }
    return c10::make_intrusive<Begun>(std::move(work), end, device, std::move(used), at_once, std::move(future));
  }

  void check(const at::Tensor& tensor) {
    TORCH_CHECK(is_device(tensor), "No backend type associated with device type cpu");
    TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
    if (device_ < 0) device_ = tensor.device().index();
    TORCH_CHECK(device_ == tensor.device().index(), "this group uses device ", device_, ", and the tensor is on ", tensor.device());
  }

  template <class One>
  static Handle one_by_one(size_t count, One one) {
    Handle last;
    for (size_t k = 0; k < count; k++) {
      last = one(k);
      last->wait();
    }
    return last;
  }
};

// DDP asks for one.
struct NoTimer final : c10d::Timer {
  explicit NoTimer(c10::Device) {}
  void record(Event) override {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

}  // namespace

void add_process_group(py::module_& module) {
  auto distributed = py::module_::import("torch.distributed");
  py::class_<Group, c10d::Backend, intrusive_ptr<Group>>(module, "ProcessGroup")
      .def(py::init([distributed](const py::object& store, int rank, int size, const py::object& options) {
        auto own = distributed.attr("PrefixStore")("gloo", store);
        auto inner = distributed.attr("ProcessGroupGloo")(own, rank, size, options.attr("_timeout"));
        return c10::make_intrusive<Group>(inner.cast<intrusive_ptr<c10d::Backend>>());
      }))
      .def_property_readonly("uid", [](const Group&) { return -1; })
      .def("_set_sequence_number_for_group", [](const Group&) {});
}

}  // namespace pretended

namespace c10d {
using Pretended = pretended::NoTimer;
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, Pretended)
}  // namespace c10d
