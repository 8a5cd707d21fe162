// Every operator of the device, by one fallback: its tensors are shown to the CPU's kernel as tensors of the CPU, and what
// comes back becomes the device's again.
#include "device.h"
#include "random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <torch/library.h>

#include <sstream>
#include <unordered_map>

namespace pretended {
namespace {

using c10::IValue;
using Stack = torch::jit::Stack;

std::string name_of(const c10::FunctionSchema& schema) {
  const auto& name = schema.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

// The tensors of one call, to the CPU and back.
struct Call {
  std::string name;
  c10::Device device{c10::kCPU};  // of the call
  bool has_device = false;
  at::Tensor host;              // the last tensor of the CPU among the arguments
  bool host_array = false;      // with at least one dimension: numbers may come from anywhere
  bool host_index = false;      // among the indices
  std::vector<at::Tensor> masks;  // boolean indices, as the CPU sees them
  Launch told;
  std::unordered_map<c10::StorageImpl*, c10::Storage> known;  // storage on the host: that on the device
  std::vector<std::pair<at::Tensor, at::Tensor>> written;     // on the device, on the host

  at::Tensor to_host(const at::Tensor& tensor, bool write) {
    if (!is_device(tensor)) {
      if (tensor.defined()) {
        host = tensor;
        host_array |= tensor.dim() > 0;
      }
      return tensor;
    }
    TORCH_CHECK(
        !has_device || device == tensor.device() || name == "aten::copy_",
        "Expected all tensors to be on the same device, but found at least two devices, ", device, " and ", tensor.device(),
        "! (", name, ")");
    device = tensor.device();
    has_device = true;
    auto alias = host_alias(tensor);
    known.emplace(alias.storage().unsafeGetStorageImpl(), tensor.storage());
    (write ? told.writes : told.reads).push_back(range_of(tensor));
    if (write) written.emplace_back(tensor, alias);
    return alias;
  }

  // `fresh` becomes true if the tensor has memory that no argument has.
  at::Tensor to_device(const at::Tensor& tensor, bool& fresh) {
    if (!tensor.defined()) return tensor;
    for (const auto& [on_device, on_host] : written)
      if (on_host.is_same(tensor)) return on_device;
    auto found = known.find(tensor.storage().unsafeGetStorageImpl());
    const bool new_memory = found == known.end();
    if (new_memory) {
      found = known.emplace(tensor.storage().unsafeGetStorageImpl(), on_device(tensor.storage(), device, told.made)).first;
      fresh = true;
    }
    const auto key = device.type() == c10::DeviceType::CUDA ? c10::DispatchKey::CUDA : c10::DispatchKey::HPU;
    auto result = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(found->second), c10::DispatchKeySet(key), tensor.dtype());
    auto* implementation = result.unsafeGetTensorImpl();
    implementation->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) implementation->set_wrapped_number(true);
    if (new_memory) told.writes.push_back(range_of(result));
    return result;
  }

  void note_index(const at::Tensor& index) {
    if (!is_device(index)) host_index = true;
    if (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte) masks.push_back(index);
  }
};

// For the sequence of operators: shapes of tensors, and the values of all else.
std::string describe(const Stack& stack, size_t begin) {
  std::ostringstream text;
  for (size_t k = begin; k < stack.size(); k++) {
    const auto& value = stack[k];
    if (k > begin) text << ", ";
    if (value.isTensor())
      value.toTensor().defined() ? text << value.toTensor().scalar_type() << value.toTensor().sizes() : text << "no tensor";
    else if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) text << tensor.scalar_type() << tensor.sizes();
    else if (value.isOptionalTensorList()) {
      for (const auto& tensor : value.toOptionalTensorVector())
        if (tensor && tensor->defined()) text << tensor->scalar_type() << tensor->sizes();
    } else if (!value.isStream() && !value.isStorage() && !value.isGenerator() && !value.isObject() && !value.isCapsule())
      text << value;
  }
  return text.str();
}

void to_host(Call& call, Stack& stack, size_t begin, const c10::FunctionSchema& schema) {
  for (size_t k = begin; k < stack.size(); k++) {
    auto& value = stack[k];
    const auto& argument = schema.arguments()[k - begin];
    const bool write = argument.alias_info() && argument.alias_info()->isWrite();
    if (value.isTensor()) {
      value = call.to_host(value.toTensor(), write);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(call.to_host(tensor, write));
      value = list;
    } else if (value.isOptionalTensorList()) {  // indices
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        if (tensor && tensor->defined()) {
          call.note_index(*tensor);
          list.push_back(call.to_host(*tensor, false));
        } else {
          list.push_back(std::nullopt);
        }
      }
      value = list;
    } else if (value.isDevice() && is_device(value.toDevice().type())) {
      const auto wanted = value.toDevice();
      call.device = c10::Device(wanted.type(), wanted.has_index() ? wanted.index() : current_device());
      call.has_device = true;
      value = c10::Device(c10::kCPU);
    }
  }
}

void resized(const Call& call) {
  for (const auto& [on_device, on_host] : call.written) {
    if (on_device.sizes() != on_host.sizes() || on_device.strides() != on_host.strides())
      on_device.unsafeGetTensorImpl()->set_sizes_and_strides(on_host.sizes(), on_host.strides());
    host_bytes_moved(on_device.storage());
  }
}

struct Outcome {
  bool tensors = false, fresh = false;
};

Outcome to_device(Call& call, Stack& stack, size_t results) {
  Outcome outcome;
  for (size_t k = stack.size() - results; k < stack.size(); k++) {
    auto& value = stack[k];
    if (value.isTensor()) {
      outcome.tensors = true;
      const auto tensor = value.toTensor();
      // A copy to the host returns its destination.
      if (!(call.host.defined() && call.host.is_same(tensor))) value = call.to_device(tensor, outcome.fresh);
    } else if (value.isTensorList()) {
      outcome.tensors = true;
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(call.to_device(tensor, outcome.fresh));
      value = list;
    }
  }
  return outcome;
}

// Draws from the device's generator: given as the argument, or lent to the CPU where the operator takes none.
struct Drawing {
  bool lent = false;
  at::Tensor kept;
  c10::DeviceIndex index = 0;

  Drawing(const Call& call, Stack& stack, size_t begin, const c10::FunctionSchema& schema) {
    index = call.device.index();
    for (size_t k = begin; k < stack.size(); k++)
      if (stack[k].isNone() && schema.arguments()[k - begin].name() == "generator") stack[k] = IValue(generator(index));
    lent = call.name == "aten::native_dropout" || call.name == "aten::_fused_dropout";
    if (lent) lend();
  }
  void lend() {
    auto& host = at::detail::getDefaultCPUGenerator();
    kept = host.get_state();
    const_cast<at::Generator&>(host).set_state(generator(index).get_state());
  }
  ~Drawing() {
    if (!lent) return;
    auto& host = const_cast<at::Generator&>(at::detail::getDefaultCPUGenerator());
    generator(index).set_state(host.get_state());
    host.set_state(kept);
  }
};

// A boolean index is turned into numbers of elements, and the host waits for how many there are: index calls nonzero, as a
// kernel of its own, but index_put does it inside. Not where one value is put under one mask: CUDA makes a masked_fill of it.
bool waits_for_mask(const Call& call, const Stack& stack, size_t begin) {
  if (call.masks.empty() || call.name.find("index_put") == std::string::npos) return false;
  const auto& values = stack[begin + 2];
  return !(values.isTensor() && values.toTensor().numel() == 1 && call.masks.size() == 1);
}

// tensor[...] alone brings its indices to the device. index_select, gather and the like want them there.
bool takes_indices_from_anywhere(const std::string& name) {
  for (const char* start : {"aten::index.", "aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index"})
    if (starts_with(name, start)) return true;
  return false;
}

bool special(const std::string& name, Stack& stack, size_t begin) {
  if (name == "aten::record_stream") {
    auto tensor = stack[begin].toTensor();
    auto stream = stack[begin + 1].toStream();
    torch::jit::drop(stack, 2);
    tell_announcement(range_of(tensor).block, stream_key(stream));
    return true;
  }
  if (starts_with(name, "aten::set_.source_Storage")) {
    auto tensor = stack[begin].toTensor();
    auto* implementation = tensor.unsafeGetTensorImpl();
    const auto storage = stack[begin + 1].toStorage();
    implementation->set_storage_keep_dtype(storage);
    if (stack.size() - begin == 2)  // all of it
      implementation->set_sizes_contiguous(c10::IntArrayRef{static_cast<int64_t>(storage.nbytes() / tensor.element_size())});
    else
      implementation->set_sizes_and_strides(
          stack[begin + 3].toIntVector(), stack[begin + 4].toIntVector(), stack[begin + 2].toInt());
    torch::jit::drop(stack, stack.size() - begin);
    torch::jit::push(stack, tensor);
    return true;
  }
  return false;
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const auto& schema = op.schema();
  const size_t begin = stack->size() - schema.arguments().size();
  Call call;
  call.name = name_of(schema);
  if (special(call.name, *stack, begin)) return;

  if (wants_arguments()) call.told.arguments = describe(*stack, begin);
  to_host(call, *stack, begin, schema);
  const bool copies = call.name == "aten::copy_" || call.name == "aten::_copy_from";
  const bool indexes = takes_indices_from_anywhere(call.name);
  TORCH_CHECK(
      !(call.has_device && call.host_array && !copies && !indexes),
      "Expected all tensors to be on the same device, but found at least two devices, ", call.device, " and cpu! (", call.name, ")");
  bool to_the_device = false, from_the_device = false, blocks = true;
  int64_t bytes = 0;
  if (copies) {
    const auto destination = (*stack)[begin].toTensor(), source = (*stack)[begin + 1].toTensor();
    to_the_device = call.host.defined() && call.host.is_same(source);
    from_the_device = call.host.defined() && !to_the_device;
    blocks = !((*stack)[begin + 2].isBool() && (*stack)[begin + 2].toBool());
    bytes = destination.numel() * static_cast<int64_t>(destination.dtype().itemsize());
  }
  call.told.name = call.name;
  call.told.waits = waits_for_mask(call, *stack, begin);
  {
    Drawing drawing(call, *stack, begin, schema);
    op.callBoxed(*stack);
  }
  resized(call);
  const auto outcome = to_device(call, *stack, schema.returns().size());
  call.told.stream = stream_key(call.device.index(), current_stream(call.device.index()));

  if (to_the_device || from_the_device) return tell_copy(call.told, to_the_device, blocks, bytes, call.host);
  if (starts_with(call.name, "aten::empty") || starts_with(call.name, "aten::resize_")) return tell_made(call.told);
  if (outcome.tensors && !outcome.fresh && call.written.empty()) return tell_view(call.told);
  if (indexes && call.host_index) tell_copy({call.name, call.told.stream}, true, true, call.host.nbytes(), call.host);
  tell_launch(call.told);
}

auto boxed() { return torch::CppFunction::makeFromBoxedFunction<&run>(); }

}  // namespace
}  // namespace pretended

// copy_ alone would find a kernel above the fallback.
TORCH_LIBRARY_IMPL(aten, CUDA, library) { library.impl("copy_", pretended::boxed()); }
TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(pretended::boxed()); }
TORCH_LIBRARY_IMPL(aten, HPU, library) { library.impl("copy_", pretended::boxed()); }
TORCH_LIBRARY_IMPL(_, HPU, library) { library.fallback(pretended::boxed()); }
