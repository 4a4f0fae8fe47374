// A stand-in for Ascend on torch's PrivateUse1: memory is the host's, and every operation runs torch's CPU kernel on the
// same memory. Operands on different devices are refused, as a real device refuses them.
//
// Only light headers are included: this compiles in seconds.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto kNpu = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kMostDevices = 16;

DeviceIndex count_devices() {
  static const DeviceIndex count = [] {
    const char* wanted = std::getenv("NPU_STAND_IN_DEVICES");
    const int number = wanted ? std::atoi(wanted) : 4;
    return static_cast<DeviceIndex>(std::min<int>(std::max(number, 0), kMostDevices));
  }();
  return count;
}

thread_local DeviceIndex current_device = 0;
thread_local c10::StreamId current_streams[kMostDevices] = {};

void check_index(DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < count_devices(), "npu device ", int(index), " does not exist: there are ",
              int(count_devices()), " (NPU_STAND_IN_DEVICES)");
}

// Memory ------------------------------------------------------------------------------------------------------

struct Figures {
  std::atomic<int64_t> allocated{0}, peak{0}, host_reads{0};
};
Figures figures[kMostDevices];

void count_bytes(DeviceIndex device, int64_t bytes) {
  const int64_t now = figures[device].allocated += bytes;
  int64_t peak = figures[device].peak;
  while (now > peak && !figures[device].peak.compare_exchange_weak(peak, now)) {
  }
}

// The owner of a device's memory: a block of the host's allocator, or the storage that a CPU kernel returned.
struct Block {
  c10::DataPtr memory;
  DeviceIndex device;
  int64_t bytes;
};

c10::DataPtr device_pointer(c10::DataPtr memory, DeviceIndex device, size_t bytes) {
  void* const data = memory.get();
  count_bytes(device, bytes);
  auto* block = new Block{std::move(memory), device, static_cast<int64_t>(bytes)};
  auto free = [](void* context) {
    auto* block = static_cast<Block*>(context);
    count_bytes(block->device, -block->bytes);
    delete block;
  };
  return {data, block, free, Device(kNpu, device)};
}

c10::DataPtr allocate_on(DeviceIndex device, size_t bytes) {
  check_index(device);
  return device_pointer(c10::GetCPUAllocator()->allocate(bytes), device, bytes);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    return allocate_on(current_device, bytes);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kNpu, &device_allocator);

std::mutex pinned_lock;
std::map<const char*, size_t> pinned_blocks;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* owner = new c10::DataPtr(c10::GetCPUAllocator()->allocate(bytes));
    void* const data = owner->get();
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned_blocks[static_cast<const char*>(data)] = bytes;
    auto free = [](void* context) {
      auto* owner = static_cast<c10::DataPtr*>(context);
      std::lock_guard<std::mutex> guard(pinned_lock);
      pinned_blocks.erase(static_cast<const char*>(owner->get()));
      delete owner;
    };
    return {data, owner, free, Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
PinnedAllocator pinned_allocator;

// Random numbers ----------------------------------------------------------------------------------------------

// A generator of the device, whose numbers are those of a CPU generator of its own.
struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator host;

  DeviceGenerator(DeviceIndex device, at::Generator host)
      : c10::GeneratorImpl(Device(kNpu, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(host)) {}
  c10::GeneratorImpl* inner() const {
    return host.unsafeGetGeneratorImpl();
  }
  void set_current_seed(uint64_t seed) override {
    inner()->set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    inner()->set_offset(offset);
  }
  uint64_t get_offset() const override {
    return inner()->get_offset();
  }
  uint64_t current_seed() const override {
    return inner()->current_seed();
  }
  uint64_t seed() override {
    return inner()->seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    inner()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner()->get_state();
  }
  DeviceGenerator* clone_impl() const override {
    return new DeviceGenerator(device().index(), host.clone());
  }
};

const at::Generator& default_generator(DeviceIndex index) {
  static const std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex i = 0; i < count_devices(); i++) {
      made.push_back(at::make_generator<DeviceGenerator>(i, at::detail::createCPUGenerator()));
    }
    return made;
  }();
  index = index < 0 ? current_device : index;
  check_index(index);
  return generators[index];
}

// Devices, streams, events ------------------------------------------------------------------------------------

// Operations are complete when they return, so a stream is a number, and an event the time of its record.
using Clock = std::chrono::steady_clock;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kNpu;
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return Device(kNpu, current_device);
  }
  void setDevice(Device device) const override {
    check_index(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override {
    return count_devices();
  }
  Stream getStream(Device device) const override {
    const DeviceIndex index = device.has_index() ? device.index() : current_device;
    return Stream(Stream::UNSAFE, Device(kNpu, index), current_streams[index]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, device);
  }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    const DeviceIndex index = device.has_index() ? device.index() : current_device;
    return Stream(Stream::UNSAFE, Device(kNpu, index), ++last);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream&) const override {
    return true;
  }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Clock::time_point;
    }
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    const auto passed = *static_cast<Clock::time_point*>(second) - *static_cast<Clock::time_point*>(first);
    return std::chrono::duration<double, std::milli>(passed).count();
  }
};
const c10::impl::DeviceGuardImplRegistrar guard(kNpu, new Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return count_devices() > 0;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return count_devices();
  }
  DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  void setCurrentDevice(DeviceIndex device) const override {
    check_index(device);
    current_device = device;
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index < 0 ? current_device : index, at::detail::createCPUGenerator());
  }
  Device getDeviceFromPtr(void*) const override {
    return Device(kNpu, current_device);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(pinned_lock);
    auto next = pinned_blocks.upper_bound(static_cast<const char*>(data));
    if (next == pinned_blocks.begin()) {
      return false;
    }
    const auto& [start, bytes] = *std::prev(next);
    return static_cast<const char*>(data) < start + std::max<size_t>(bytes, 1);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto memory = allocate_on(storage.device().index(), bytes);
    if (const size_t kept = std::min(bytes, storage.nbytes())) {
      std::memcpy(memory.get(), storage.data(), kept);
    }
    storage.set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// Operations on the CPU, on the same memory -------------------------------------------------------------------

using Tensors = std::vector<at::Tensor>;

c10::Storage host_storage(const c10::Storage& storage) {
  auto release = [](void* context) { delete static_cast<c10::Storage*>(context); };
  c10::DataPtr data(storage.unsafeGetStorageImpl()->mutable_data_ptr().get(), new c10::Storage(storage), release,
                    Device(c10::DeviceType::CPU));
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
}

// A tensor like `x` over another storage, which decides its device.
at::Tensor over(const at::Tensor& x, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), x.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  made._set_conj(x.is_conj());
  made._set_neg(x.is_neg());
  made._set_zero(x._is_zerotensor());
  return made;
}

// One call of a CPU kernel: the aliases of its operands, and the way back of its results.
struct HostCall {
  struct Operand {
    at::Tensor device, host;
  };
  std::unordered_map<c10::StorageImpl*, c10::Storage> hosts;     // of storages of the device
  std::unordered_map<c10::StorageImpl*, c10::Storage> devices;   // of storages of the host
  std::vector<Operand> operands;
  Device target{kNpu, current_device};

  at::Tensor to_host(const at::Tensor& x) {
    if (!x.defined() || !x.is_privateuseone()) {
      return x;
    }
    auto& host = hosts[x.storage().unsafeGetStorageImpl()];
    if (!host) {
      host = host_storage(x.storage());
      devices[host.unsafeGetStorageImpl()] = x.storage();
    }
    operands.push_back({x, over(x, host, c10::DispatchKey::CPU)});
    return operands.back().host;
  }

  at::Tensor to_device(const at::Tensor& x) {
    if (!x.defined() || !x.device().is_cpu()) {
      return x;
    }
    for (auto& operand : operands) {
      if (operand.host.is_same(x)) {
        return operand.device;
      }
    }
    auto& device = devices[x.storage().unsafeGetStorageImpl()];
    if (!device) {
      device = taken(x.storage());
    }
    return over(x, device, c10::DispatchKey::PrivateUse1);
  }

  // A storage of the device that owns one of the host.
  c10::Storage taken(const c10::Storage& host) {
    auto release = [](void* context) { delete static_cast<c10::Storage*>(context); };
    void* const data = host.unsafeGetStorageImpl()->mutable_data_ptr().get();
    c10::DataPtr owner(data, new c10::Storage(host), release, Device(c10::DeviceType::CPU));
    const size_t bytes = host.nbytes();
    return c10::Storage(c10::Storage::use_byte_size_t(), bytes,
                        device_pointer(std::move(owner), target.index(), bytes), &device_allocator, true);
  }

  // Kernels resize results given as `out`; then the device's tensor follows.
  void follow_resizes() {
    for (auto& [device, host] : hosts) {
      if (host.data() != device->data() || host.nbytes() != device->nbytes()) {
        const auto moved = taken(host);
        device->set_data_ptr_noswap(std::move(moved.unsafeGetStorageImpl()->mutable_data_ptr()));
        device->set_nbytes(host.nbytes());
      }
    }
    for (auto& [device, host] : operands) {
      if (device.sizes() != host.sizes() || device.strides() != host.strides()) {
        device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
      }
    }
  }
};

template <class Function>
c10::IValue map_tensors(const c10::IValue& value, Function&& function) {
  if (value.isTensor()) {
    return function(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& x : value.toTensorVector()) {
      mapped.push_back(function(x));
    }
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor>& x : value.toOptionalTensorVector()) {
      mapped.push_back(x.has_value() ? std::optional<at::Tensor>(function(*x)) : std::nullopt);
    }
    return mapped;
  }
  return value;
}

// Indices may be on the host, as for every device of torch; a host scalar may be an operand.
bool may_be_on_host(const std::string& name, const at::Tensor& x, bool is_written) {
  return (x.dim() == 0 && !is_written) || name == "aten::index" || name == "aten::_index_put_impl_" ||
      name == "aten::index_put" || name == "aten::index_put_";
}

void check_devices(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  std::optional<Device> device;
  auto each = [&](auto&& visit) {
    for (size_t i = 0; i < arguments.size(); i++) {
      const auto* alias = schema.arguments()[i].alias_info();
      map_tensors(arguments[i], [&](const at::Tensor& x) {
        if (x.defined()) {
          visit(x, alias != nullptr && alias->isWrite());
        }
        return x;
      });
    }
  };
  each([&](const at::Tensor& x, bool) {
    if (x.is_privateuseone()) {
      TORCH_CHECK(!device || *device == x.device(), schema.name(),
                  ": Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                  x.device(), "!");
      device = x.device();
    }
  });
  each([&](const at::Tensor& x, bool is_written) {
    TORCH_CHECK(!device || x.is_privateuseone() || may_be_on_host(schema.name(), x, is_written), schema.name(),
                ": Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                x.device(), "!");
  });
}

// Views of freed memory are made before it is filled again. Every other operation would read or write it.
void check_memory(const c10::FunctionSchema& schema, const std::vector<HostCall::Operand>& operands) {
  for (const auto& result : schema.returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) {
      return;
    }
  }
  for (const auto& [x, host] : operands) {
    TORCH_CHECK(x.numel() == 0 || x.storage().nbytes() > 0, schema.name(), ": the memory of an operand has been freed");
  }
}

void run_on_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  const size_t num_arguments = schema.arguments().size(), first = stack->size() - num_arguments;
  check_devices(schema, c10::ArrayRef<c10::IValue>(*stack).slice(first));
  HostCall call;
  for (size_t i = 0; i < num_arguments; i++) {
    c10::IValue& value = (*stack)[first + i];
    if (value.isDevice() && value.toDevice().type() == kNpu) {
      call.target = value.toDevice().has_index() ? value.toDevice() : call.target;
      value = Device(c10::DeviceType::CPU);
    } else if (value.isGenerator()) {
      if (auto* generator = dynamic_cast<DeviceGenerator*>(value.toGenerator().unsafeGetGeneratorImpl())) {
        value = generator->host;
      }
    } else {
      value = map_tensors(value, [&](const at::Tensor& x) { return call.to_host(x); });
    }
  }
  check_memory(schema, call.operands);
  if (!call.operands.empty()) {
    call.target = call.operands.front().device.device();
  }
  for (size_t i = 0; i < num_arguments; i++) {
    const auto& type = schema.arguments()[i].type();
    const bool takes_generator = type->kind() == c10::TypeKind::OptionalType &&
        type->expectRef<c10::OptionalType>().getElementType()->kind() == c10::TypeKind::GeneratorType;
    if (takes_generator && (*stack)[first + i].isNone()) {
      const auto& generator = default_generator(call.target.index());
      (*stack)[first + i] = static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->host;
    }
  }
  operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.follow_resizes();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    (*stack)[i] = map_tensors((*stack)[i], [&](const at::Tensor& x) { return call.to_device(x); });
  }
}

// Operations with an implementation of their own --------------------------------------------------------------

template <class Result, class... Arguments>
Result on_host(const char* name, const char* overload, Arguments... arguments) {
  static const auto operation =
      c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).typed<Result(Arguments...)>();
  return operation.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), std::forward<Arguments>(arguments)...);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  const auto type = c10::scalarTypeToTypeMeta(dtype.value_or(c10::get_default_dtype_as_scalartype()));
  size_t elements = 1;
  for (size_t i = 0; i < sizes.size(); i++) {
    TORCH_CHECK(sizes[i] >= 0, "Trying to create tensor with negative dimension ", sizes[i], ": ", sizes);
    elements = sizes[i] == 0 || elements == 0 ? 0 : elements + (sizes[i] - 1) * strides[i];
  }
  const size_t bytes = elements * type.itemsize();
  const DeviceIndex index = device && device->has_index() ? device->index() : current_device;
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, allocate_on(index, bytes), &device_allocator, true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return made;
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  std::vector<int64_t> strides(sizes.size(), 1);
  if (format == at::MemoryFormat::ChannelsLast) {
    strides = c10::get_channels_last_strides_2d(sizes);
  } else if (format == at::MemoryFormat::ChannelsLast3d) {
    strides = c10::get_channels_last_strides_3d(sizes);
  } else {
    for (size_t i = sizes.size(); i-- > 1;) {
      strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
    }
  }
  return empty_strided(size, c10::fromIntArrayRefSlow(strides), dtype, layout, device, pinned);
}

at::Tensor host_view(const at::Tensor& x) {
  return x.is_privateuseone() ? over(x, host_storage(x.storage()), c10::DispatchKey::CPU) : x;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (source.is_privateuseone() && target.device().is_cpu()) {
    figures[source.device().index()].host_reads += !non_blocking;
  }
  on_host<at::Tensor&, at::Tensor&, const at::Tensor&, bool>(
      "aten::copy_", "", const_cast<at::Tensor&>(static_cast<const at::Tensor&>(host_view(target))), host_view(source),
      non_blocking);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  auto* impl = target.unsafeGetTensorImpl();
  if (target.sizes() != source.sizes()) {
    TORCH_CHECK(target.numel() == 0 || target.numel() == source.numel(), "cannot resize the target of a copy");
    const size_t bytes = source.numel() * source.itemsize();
    if (target.storage().nbytes() < bytes) {
      at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(target.storage(), bytes);
    }
    impl->set_sizes_contiguous(source.sizes());
  }
  return copy_from(source, target, false);
}

const at::Tensor& resize(const at::Tensor& x, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = x.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  const size_t bytes = (x.storage_offset() + x.numel()) * x.itemsize();
  if (x.storage().nbytes() < bytes) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(x.storage(), bytes);
  }
  return x;
}

at::Tensor& set_storage(at::Tensor& x, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  auto* impl = x.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  if (strides.size() == sizes.size()) {
    impl->set_sizes_and_strides(sizes, strides, offset.expect_int());
  } else {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset.expect_int());
  }
  return x;
}

at::Tensor& set_tensor(at::Tensor& x, const at::Tensor& source) {
  return set_storage(x, source.storage(), source.storage_offset(), c10::fromIntArrayRefSlow(source.sizes()),
                     c10::fromIntArrayRefSlow(source.strides()));
}

at::Tensor& set_whole_storage(at::Tensor& x, c10::Storage source) {
  const int64_t elements = source.nbytes() / x.itemsize();
  return set_storage(x, std::move(source), 0, c10::fromIntArrayRefSlow({elements}), {});
}

at::Scalar local_scalar(const at::Tensor& x) {
  figures[x.device().index()].host_reads++;
  return on_host<at::Scalar, const at::Tensor&>("aten::_local_scalar_dense", "", host_view(x));
}

void record_stream(at::Tensor&, Stream) {}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("record_stream", TORCH_FN(record_stream));
  // These are composed of operations by device type, of which this device has none.
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// A copy understands conjugated and negated views itself.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

int64_t figure(const std::string& name, int64_t device) {
  check_index(device);
  auto& all = figures[device];
  return name == "allocated" ? all.allocated : name == "peak" ? all.peak : all.host_reads;
}

void reset_figures(int64_t device) {
  check_index(device);
  figures[device].peak = figures[device].allocated.load();
  figures[device].host_reads = 0;
}

TORCH_LIBRARY(npu_stand_in, m) {
  m.def("host_view(Tensor x) -> Tensor", host_view);
  m.def("figure(str name, int device) -> int", figure);
  m.def("reset_figures(int device) -> ()", reset_figures);
  m.def("device_count() -> int", [] { return int64_t(count_devices()); });
  m.def("current_device() -> int", [] { return int64_t(current_device); });
  m.def("set_device(int device) -> ()", [](int64_t device) {
    check_index(device);
    current_device = device;
  });
}

const bool has_hooks = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

} // namespace

// Called by the Python module in group.cpp, since an operation cannot return a generator.
at::Generator npu_default_generator(int64_t device) {
  return default_generator(static_cast<DeviceIndex>(device));
}
