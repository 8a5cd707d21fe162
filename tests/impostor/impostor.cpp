// "CUDA" on a CPU-only torch: real at::Tensors with device cuda:0, a boxed fallback that runs the CPU kernel, streams and
// events that are only bookkeeping, and a c10d backend with NCCL's stream semantics. Everything is told to one Python callback.
#include <torch/extension.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <ATen/CPUGeneratorImpl.h>
#include <mutex>
#include <map>
#include <set>
#include <unordered_map>
using namespace c10;
namespace {
constexpr auto kDev = DeviceType::CUDA;
const Device DEV(kDev, 0);
constexpr uint64_t BOGUS = 1ull << 62;  // whoever dereferences device memory on the host dies, as on a GPU
PyObject* callback = nullptr;
std::mutex freed_mutex;
std::vector<int64_t> freed;
std::atomic<int64_t> next_id{1}, next_stream{1}, next_event{1};
thread_local int64_t current = 0;

struct Access { int64_t id, lo, hi; };

void emit(const char* kind, const std::string& name, int64_t stream, int64_t number, const std::vector<Access>& reads,
          const std::vector<Access>& writes, const std::vector<std::pair<int64_t, int64_t>>& allocs, const at::Tensor& host = {}) {
  if (!callback || !Py_IsInitialized()) return;
  std::vector<int64_t> gone;
  { std::lock_guard<std::mutex> g(freed_mutex); gone.swap(freed); }
  py::gil_scoped_acquire gil;
  auto list = [](const std::vector<Access>& a) { py::list r; for (auto& x : a) r.append(py::make_tuple(x.id, x.lo, x.hi)); return r; };
  py::list al; for (auto& a : allocs) al.append(py::make_tuple(a.first, a.second));
  py::object h = host.defined() ? py::cast(host) : py::none();
  py::reinterpret_borrow<py::object>(callback)(kind, name, stream, number, list(reads), list(writes), al, py::cast(gone), h);
}

struct Ctx { Storage cpu; int64_t id; };
void del(void* p) {
  auto* c = static_cast<Ctx*>(p);
  { std::lock_guard<std::mutex> g(freed_mutex); freed.push_back(c->id); }
  delete c;
}
void* bogus(const void* p) { return p ? reinterpret_cast<void*>(reinterpret_cast<uint64_t>(p) ^ BOGUS) : nullptr; }
Ctx* ctx_of(const Storage& s) {
  TORCH_CHECK(s.data_ptr().get_deleter() == &del, "a cuda storage that is not ours");
  return static_cast<Ctx*>(s.data_ptr().get_context());
}
struct DeviceAllocator final : Allocator {
  DataPtr allocate(size_t n) override {
    auto dp = GetCPUAllocator()->allocate(n);
    void* p = dp.get();
    auto* c = new Ctx{Storage(Storage::use_byte_size_t(), n, std::move(dp), GetCPUAllocator(), true), next_id++};
    return {bogus(p), c, &del, DEV};
  }
  DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "copy_data"); }
};
DeviceAllocator device_allocator;

Storage new_storage(const Storage& cpu, std::vector<std::pair<int64_t, int64_t>>& allocs) {
  auto* c = new Ctx{cpu, next_id++};
  allocs.emplace_back(c->id, cpu.nbytes());
  return Storage(Storage::use_byte_size_t(), cpu.nbytes(), DataPtr(bogus(cpu.data()), c, &del, DEV), &device_allocator, true);
}
at::Tensor cpu_of(const at::Tensor& t) {
  auto r = at::detail::make_tensor<TensorImpl>(Storage(ctx_of(t.storage())->cpu), DispatchKeySet(DispatchKey::CPU), t.dtype());
  r.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) r.unsafeGetTensorImpl()->set_wrapped_number(true);
  return r;
}
Access access(const at::Tensor& t) {
  int64_t lo = t.storage_offset(), hi = lo + 1, item = t.dtype().itemsize();
  for (int64_t d = 0; d < t.dim(); d++) { if (t.size(d) == 0) return {ctx_of(t.storage())->id, lo * item, lo * item}; hi += (t.size(d) - 1) * t.stride(d); }
  return {ctx_of(t.storage())->id, lo * item, hi * item};
}
bool ours(const at::Tensor& t) { return t.defined() && t.device().type() == kDev; }

struct Conversion {
  std::unordered_map<StorageImpl*, Storage> known;  // cpu -> cuda
  std::vector<Access> reads, writes;
  std::vector<std::pair<int64_t, int64_t>> allocs;
  std::vector<std::pair<at::Tensor, at::Tensor>> written;
  at::Tensor host;
  bool any_cuda = false, bool_index = false, cpu_array = false;
  at::Tensor in(const at::Tensor& t, bool write) {
    if (!ours(t)) {
      if (t.defined()) { if (t.dim() > 0) { cpu_array = true; } host = t; }
      return t;
    }
    any_cuda = true;
    auto a = cpu_of(t);
    known.emplace(a.storage().unsafeGetStorageImpl(), t.storage());
    (write ? writes : reads).push_back(access(t));
    if (write) written.emplace_back(t, a);
    return a;
  }
  at::Tensor out(const at::Tensor& t, bool& fresh) {
    if (!t.defined()) return t;
    for (auto& w : written) if (w.second.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) return w.first;
    auto it = known.find(t.storage().unsafeGetStorageImpl());
    Storage s;
    if (it != known.end()) s = it->second;
    else { s = new_storage(t.storage(), allocs); known.emplace(t.storage().unsafeGetStorageImpl(), s); fresh = true; }
    auto r = at::detail::make_tensor<TensorImpl>(std::move(s), DispatchKeySet(DispatchKey::CUDA), t.dtype());
    r.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) r.unsafeGetTensorImpl()->set_wrapped_number(true);
    if (fresh) writes.push_back(access(r));
    return r;
  }
};

void fallback(const OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const auto& schema = op.schema();
  const auto name = schema.operator_name().name + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  const size_t n = schema.arguments().size(), begin = stack->size() - n;
  Conversion c;
  if (name == "aten::record_stream") {
    auto t = (*stack)[begin].toTensor();
    int64_t s = (*stack)[begin + 1].toStream().id();
    torch::jit::drop(*stack, n);
    emit("record_stream", name, current, s, {access(t)}, {}, {});
    return;
  }
  if (schema.operator_name().name == "aten::set_" && n > 1 && (*stack)[begin + 1].isStorage()) {
    auto t = (*stack)[begin].toTensor();
    auto s = (*stack)[begin + 1].toStorage();
    t.unsafeGetTensorImpl()->set_storage_keep_dtype(s);
    if (n > 2) t.unsafeGetTensorImpl()->set_sizes_and_strides((*stack)[begin + 3].toIntVector(), (*stack)[begin + 4].toIntVector(), (*stack)[begin + 2].toInt());
    torch::jit::drop(*stack, n); torch::jit::push(*stack, t);
    return;
  }
  bool index_op = name.find("index") != std::string::npos;
  for (size_t i = 0; i < n; i++) {
    auto& v = (*stack)[begin + i];
    const auto* info = schema.arguments()[i].alias_info();
    bool write = info && info->isWrite();
    if (v.isTensor()) { v = c.in(v.toTensor(), write); }
    else if (v.isTensorList()) { c10::List<at::Tensor> l; for (const at::Tensor& t : v.toTensorVector()) l.push_back(c.in(t, write)); v = l; }
    else if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> l;
      for (const auto& e : v.toOptionalTensorVector()) {
        if (e && e->defined()) { if (e->scalar_type() == at::kBool || e->scalar_type() == at::kByte) c.bool_index = true; l.push_back(c.in(*e, false)); }
        else l.push_back(std::nullopt);
      }
      v = l;
    } else if (v.isDevice() && v.toDevice().type() == kDev) v = Device(kCPU);
  }
  bool is_copy = name == "aten::copy_" || name == "aten::_copy_from";
  TORCH_CHECK(!(c.any_cuda && c.cpu_array && !is_copy && !index_op),
              "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (", name, ")");
  bool h2d = false, d2h = false, nonblocking = false;
  int64_t bytes = 0;
  if (is_copy) {
    auto a = (*stack)[begin].toTensor(), b = (*stack)[begin + 1].toTensor();
    h2d = c.host.defined() && c.host.unsafeGetTensorImpl() == b.unsafeGetTensorImpl();
    d2h = c.host.defined() && !h2d;
    nonblocking = n > 2 && (*stack)[begin + 2].isBool() && (*stack)[begin + 2].toBool();
    bytes = a.numel() * (int64_t)a.dtype().itemsize();
  }
  op.callBoxed(*stack);
  for (auto& w : c.written) {
    if (w.first.sizes() != w.second.sizes() || w.first.strides() != w.second.strides())
      w.first.unsafeGetTensorImpl()->set_sizes_and_strides(w.second.sizes(), w.second.strides());
    auto& s = w.first.storage();
    if (s.nbytes() != w.second.storage().nbytes()) {
      auto* impl = s.unsafeGetStorageImpl();
      auto* ctx = ctx_of(s);
      auto old = impl->set_data_ptr(DataPtr(bogus(ctx->cpu.data()), ctx, &del, DEV));
      old.release_context();
      impl->set_nbytes(w.second.storage().nbytes());
    }
  }
  const size_t m = schema.returns().size(), first = stack->size() - m;
  bool tensors_out = false, fresh = false;
  for (size_t i = 0; i < m; i++) {
    auto& v = (*stack)[first + i];
    bool f = false;
    if (v.isTensor()) {
      tensors_out = true;
      if (d2h && c.host.defined() && v.toTensor().unsafeGetTensorImpl() == c.host.unsafeGetTensorImpl()) {}
      else v = c.out(v.toTensor(), f);
    } else if (v.isTensorList()) {
      tensors_out = true;
      c10::List<at::Tensor> l;
      for (const at::Tensor& t : v.toTensorVector()) { bool g = false; l.push_back(c.out(t, g)); f |= g; }
      v = l;
    }
    fresh |= f;
  }
  const char* kind = "kernel";
  if (is_copy && (h2d || d2h)) kind = h2d ? (nonblocking ? "h2d_async" : "h2d") : (nonblocking ? "d2h_async" : "d2h");
  else if (name.rfind("aten::empty", 0) == 0 || name.rfind("aten::resize_", 0) == 0) kind = "alloc";
  else if (tensors_out && !fresh && c.written.empty()) kind = "view";
  else if (c.bool_index) kind = "sync_kernel";
  else if (index_op && c.cpu_array) kind = "index_h2d";
  if (std::string(kind) == "view") { c.reads.clear(); }
  if (std::string(kind) == "alloc") { c.reads.clear(); c.writes.clear(); }
  emit(kind, name, current, bytes, c.reads, c.writes, c.allocs, is_copy ? c.host : at::Tensor());
}

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kDev; }
  Device exchangeDevice(Device) const override { return DEV; }
  Device getDevice() const override { return DEV; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::UNSAFE, DEV, current); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::UNSAFE, DEV, 0); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return Stream(Stream::UNSAFE, DEV, next_stream++); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::UNSAFE, DEV, next_stream++); }
  Stream exchangeStream(Stream s) const override { auto old = current; current = s.id(); return Stream(Stream::UNSAFE, DEV, old); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** e, const Stream& s, const DeviceIndex, const EventFlag) const override {
    if (!*e) *e = new int64_t(next_event++);
    emit("record", "", s.id(), *(int64_t*)*e, {}, {}, {});
  }
  void block(void* e, const Stream& s) const override { if (e) emit("block", "", s.id(), *(int64_t*)e, {}, {}, {}); }
  bool queryEvent(void* e) const override { if (e) emit("query_event", "", current, *(int64_t*)e, {}, {}, {}); return true; }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete (int64_t*)e; }
  bool queryStream(const Stream& s) const override { return true; }
  void synchronizeStream(const Stream& s) const override { emit("sync_stream", "", current, s.id(), {}, {}, {}); }
  void synchronizeEvent(void* e) const override { if (e) emit("sync_event", "", current, *(int64_t*)e, {}, {}, {}); }
  void synchronizeDevice(const DeviceIndex) const override { emit("sync_device", "", current, 0, {}, {}, {}); }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
  void recordDataPtrOnStream(const DataPtr& d, const Stream& s) const override {
    if (d.get_deleter() == &del) emit("record_stream", "autograd", current, s.id(), {{static_cast<Ctx*>(d.get_context())->id, 0, 0}}, {}, {});
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned;
struct PinnedAllocator final : Allocator {
  static void gone(void* p) { { std::lock_guard<std::mutex> g(pinned_mutex); pinned.erase((char*)p); } free(p); }
  DataPtr allocate(size_t n) override {
    void* p = nullptr;
    TORCH_CHECK(posix_memalign(&p, 64, n ? n : 1) == 0);
    { std::lock_guard<std::mutex> g(pinned_mutex); pinned[(char*)p] = n; }
    return {p, p, &gone, Device(kCPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &gone; }
  void copy_data(void* d, const void* s, size_t n) const override { memcpy(d, s, n); }
};
PinnedAllocator pinned_allocator;
bool is_pinned(const void* p) {
  std::lock_guard<std::mutex> g(pinned_mutex);
  auto it = pinned.upper_bound((const char*)p);
  if (it == pinned.begin()) return false;
  --it;
  return (const char*)p < it->first + std::max<size_t>(it->second, 1);
}
struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  at::Generator getNewGenerator(DeviceIndex = -1) const override { return at::detail::getDefaultCPUGenerator().clone(); }
  const at::Generator& getDefaultGenerator(DeviceIndex = -1) const override { return at::detail::getDefaultCPUGenerator(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
  void deviceSynchronize(DeviceIndex) const override { emit("sync_device", "", current, 0, {}, {}, {}); }
};
}  // namespace
namespace at { using CUDAHooks = Hooks; C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks) }
TORCH_LIBRARY_IMPL(aten, CUDA, m) { m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

namespace {
using c10d::Work;
struct ImpostorWork final : Work {
  intrusive_ptr<Work> inner; int64_t end; std::vector<at::Tensor> stash; bool waited = false; std::string name;
  ImpostorWork(intrusive_ptr<Work> i, int64_t e, std::vector<at::Tensor> s, bool w, std::string n) : inner(i), end(e), stash(s), waited(w), name(n) {}
  bool isCompleted() override { return waited || inner->isCompleted(); }
  bool isSuccess() const override { return true; }
  void synchronize() override { wait(std::chrono::milliseconds(0)); }
  bool wait(std::chrono::milliseconds t) override {
    if (!waited) { inner->wait(t); waited = true; }
    emit("block", name, current, end, {}, {}, {});
    stash.clear();
    return true;
  }
};
struct Impostor final : c10d::Backend {
  intrusive_ptr<c10d::Backend> inner; int64_t comm;
  explicit Impostor(intrusive_ptr<c10d::Backend> i) : Backend(i->getRank(), i->getSize()), inner(i), comm(next_stream++) {}
  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return false; }
  template <class F>
  intrusive_ptr<Work> launch(const char* name, const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes, F f, bool sync = true) {
    int64_t start = next_event++, end = next_event++;
    emit("record", name, current, start, {}, {}, {});
    emit("block", name, comm, start, {}, {}, {});
    intrusive_ptr<Work> w = f();
    if (sync) w->wait();
    std::vector<Access> r, o; std::vector<at::Tensor> stash;
    for (auto& t : reads) { TORCH_CHECK(ours(t), "a CPU tensor in NCCL"); TORCH_CHECK(t.is_contiguous(), "Tensors must be contiguous"); r.push_back(access(t)); stash.push_back(t); }
    for (auto& t : writes) { TORCH_CHECK(ours(t), "a CPU tensor in NCCL"); TORCH_CHECK(t.is_contiguous(), "Tensors must be contiguous"); o.push_back(access(t)); stash.push_back(t); }
    emit("nccl", name, comm, getSize(), r, o, {});
    emit("record", name, comm, end, {}, {}, {});
    return make_intrusive<ImpostorWork>(w, end, stash, sync, name);
  }
  static std::vector<at::Tensor> al(const std::vector<at::Tensor>& v) { std::vector<at::Tensor> r; for (auto& t : v) r.push_back(cpu_of(t)); return r; }
  static std::vector<std::vector<at::Tensor>> al2(const std::vector<std::vector<at::Tensor>>& v) { std::vector<std::vector<at::Tensor>> r; for (auto& x : v) r.push_back(al(x)); return r; }
  static std::vector<at::Tensor> flat(const std::vector<std::vector<at::Tensor>>& v) { std::vector<at::Tensor> r; for (auto& x : v) for (auto& t : x) r.push_back(t); return r; }
  using W = intrusive_ptr<Work>; using V = std::vector<at::Tensor>; using VV = std::vector<V>;
  W broadcast(V& t, const c10d::BroadcastOptions& o) override { auto a = al(t); return launch("broadcast", {}, t, [&] { return inner->broadcast(a, o); }); }
  W allreduce(V& t, const c10d::AllreduceOptions& o) override { auto a = al(t); return launch("allreduce", {}, t, [&] { return inner->allreduce(a, o); }); }
  W allreduce_coalesced(V& t, const c10d::AllreduceCoalescedOptions& o) override {
    return launch("allreduce_coalesced", {}, t, [&] { c10d::AllreduceOptions p; p.reduceOp = o.reduceOp; W last; for (auto& x : t) { V a{cpu_of(x)}; last = inner->allreduce(a, p); last->wait(); } return last; }); }
  W reduce(V& t, const c10d::ReduceOptions& o) override { auto a = al(t); return launch("reduce", {}, t, [&] { return inner->reduce(a, o); }); }
  W allgather(VV& out, V& in, const c10d::AllgatherOptions& o) override { auto a = al2(out); auto b = al(in); return launch("allgather", in, flat(out), [&] { return inner->allgather(a, b, o); }); }
  W _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override { auto a = cpu_of(out), b = cpu_of(in); return launch("allgather_base", {in}, {out}, [&] { return inner->_allgather_base(a, b, o); }); }
  W allgather_into_tensor_coalesced(V& out, V& in, const c10d::AllgatherOptions& o) override {
    return launch("allgather_coalesced", in, out, [&] { W last; for (size_t i = 0; i < out.size(); i++) { auto a = cpu_of(out[i]), b = cpu_of(in[i]); last = inner->_allgather_base(a, b, o); last->wait(); } return last; }); }
  W gather(VV& out, V& in, const c10d::GatherOptions& o) override { auto a = al2(out); auto b = al(in); return launch("gather", in, flat(out), [&] { return inner->gather(a, b, o); }); }
  W scatter(V& out, VV& in, const c10d::ScatterOptions& o) override { auto a = al(out); auto b = al2(in); return launch("scatter", flat(in), out, [&] { return inner->scatter(a, b, o); }); }
  W reduce_scatter(V& out, VV& in, const c10d::ReduceScatterOptions& o) override { auto a = al(out); auto b = al2(in); return launch("reduce_scatter", flat(in), out, [&] { return inner->reduce_scatter(a, b, o); }); }
  W _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override { auto a = cpu_of(out), b = cpu_of(in); return launch("reduce_scatter_base", {in}, {out}, [&] { return inner->_reduce_scatter_base(a, b, o); }); }
  W reduce_scatter_tensor_coalesced(V& out, V& in, const c10d::ReduceScatterOptions& o) override {
    return launch("reduce_scatter_coalesced", in, out, [&] { W last; for (size_t i = 0; i < out.size(); i++) { auto a = cpu_of(out[i]), b = cpu_of(in[i]); last = inner->_reduce_scatter_base(a, b, o); last->wait(); } return last; }); }
  W alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& os, std::vector<int64_t>& is, const c10d::AllToAllOptions& o) override { auto a = cpu_of(out), b = cpu_of(in); return launch("alltoall_base", {in}, {out}, [&] { return inner->alltoall_base(a, b, os, is, o); }); }
  W alltoall(V& out, V& in, const c10d::AllToAllOptions& o) override { auto a = al(out), b = al(in); return launch("alltoall", in, out, [&] { return inner->alltoall(a, b, o); }); }
  W send(V& t, int dst, int tag) override { auto a = al(t); return launch("send", t, {}, [&] { return inner->send(a, dst, tag); }, false); }
  W recv(V& t, int src, int tag) override { auto a = al(t); return launch("recv", {}, t, [&] { return inner->recv(a, src, tag); }, false); }
  W barrier(const c10d::BarrierOptions& o) override { emit("sync_device", "barrier", current, 0, {}, {}, {}); return inner->barrier(o); }
};
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  auto& hooks = at::detail::getCUDAHooks();
  if (!hooks.hasCUDA()) {  // torch made its default hooks at import: give that object our virtual table
    static Hooks mine{at::CUDAHooksArgs{}};
    *reinterpret_cast<void**>(const_cast<at::CUDAHooksInterface*>(&hooks)) = *reinterpret_cast<void**>(&mine);
  }
  m.def("set_callback", [](py::object o) { callback = o.is_none() ? nullptr : o.release().ptr(); });
  m.def("current_stream", [] { return current; });
  m.def("set_stream", [](int64_t s) { current = s; });
  m.def("is_pinned", [](at::Tensor t) { return is_pinned(t.const_data_ptr()); });
  m.def("storage_id", [](at::Tensor t) { return ctx_of(t.storage())->id; });
  m.def("cpu_alias", [](at::Tensor t) { return cpu_of(t); });
  py::module_::import("torch.distributed");
  py::class_<Impostor, c10d::Backend, intrusive_ptr<Impostor>>(m, "ProcessGroupNCCL")
      .def(py::init([](const py::object& store, int rank, int size, const py::object& options) {
        py::object gloo = py::module_::import("torch.distributed").attr("ProcessGroupGloo");
        py::object prefixed = py::module_::import("torch.distributed").attr("PrefixStore")("gloo", store);
        py::object inner = gloo(prefixed, rank, size, options.attr("_timeout"));
        return make_intrusive<Impostor>(inner.cast<intrusive_ptr<c10d::Backend>>());
      }))
      .def_property_readonly("uid", [](const Impostor&) { return -1; })
      .def("_set_sequence_number_for_group", [](Impostor&) {});
}
