// A simulated CUDA device for the CPU build of torch: the C++ interfaces that autograd, streams and
// events require. Nothing runs; stream operations are reported to a listener. This library must be
// loaded before torch, which looks up these implementations only once.
//
// Interfaces: c10/core/impl/DeviceGuardImplInterface.h, ATen/detail/CUDAHooksInterface.h.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

namespace {

// Called with the operation, the event's ID (0: none) and the stream, on the calling thread.
using Listener = void (*)(const char* what, int64_t event, int64_t stream);

Listener listener = nullptr;
std::atomic<int64_t> num_streams{0};
std::atomic<int64_t> num_events{0};
thread_local c10::StreamId current_stream = 0;

void notify(const char* what, int64_t event, int64_t stream) {
  if (listener != nullptr) {
    listener(what, event, stream);
  }
}

c10::Stream stream_of(c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, 0), id);
}

} // namespace

extern "C" void graphshard_listen(Listener to) {
  listener = to;
}

namespace c10::impl {

struct NoGpuGuard final : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override {
    return Device(DeviceType::CUDA, 0);
  }
  Device getDevice() const override {
    return Device(DeviceType::CUDA, 0);
  }
  Stream getStream(Device) const noexcept override {
    return stream_of(current_stream);
  }
  Stream getDefaultStream(Device) const override {
    return stream_of(0);
  }
  Stream getNewStream(Device, int) const override {
    return stream_of(++num_streams);
  }
  Stream getStreamFromGlobalPool(Device, bool) const override {
    return stream_of(++num_streams);
  }
  Stream exchangeStream(Stream stream) const noexcept override {
    auto before = stream_of(current_stream);
    current_stream = stream.id();
    return before;
  }
  // The pointer holds the event's ID. Recording an event again gives it a new ID.
  void record(void** event, const Stream& stream, const DeviceIndex, const EventFlag) const override {
    const int64_t number = ++num_events;
    *event = reinterpret_cast<void*>(number);
    notify("record", number, stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    notify("wait", reinterpret_cast<int64_t>(event), stream.id());
  }
  bool queryEvent(void*) const override {
    return true;
  }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeEvent(void* event) const override {
    notify("synchronize_event", reinterpret_cast<int64_t>(event), 0);
  }
  bool queryStream(const Stream&) const override {
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    notify("synchronize_stream", 0, stream.id());
  }
  void synchronizeDevice(const DeviceIndex) const override {
    notify("synchronize_device", 0, 0);
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, NoGpuGuard)

} // namespace c10::impl

namespace at {

struct NoGpuHooks final : CUDAHooksInterface {
  explicit NoGpuHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasCUDA() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return 1;
  }
  int getNumGPUs() const override {
    return 1;
  }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  DeviceIndex exchangeDevice(DeviceIndex) const override {
    return 0;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override {
    return 0;
  }
  DeviceIndex current_device() const override {
    return 0;
  }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, NoGpuHooks)

namespace native {

// Chooses the backend of scaled_dot_product_attention by the main rules of
// aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. Without a choice, attention would be
// decomposed into matmuls.
int64_t choose_attention(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::optional<Tensor>& mask,
    double dropout,
    bool is_causal,
    std::optional<double> scale,
    bool enable_gqa) {
  const auto& context = at::globalContext();
  const bool half = query.scalar_type() == kHalf || query.scalar_type() == kBFloat16;
  const bool dense = query.dim() == 4;
  if (dense && half && !mask && query.sym_size(3) <= 256 && context.userEnabledFlashSDP()) {
    return static_cast<int64_t>(SDPBackend::flash_attention);
  }
  const bool same_heads = dense && query.sym_size(1) == key.sym_size(1);
  if (same_heads && context.userEnabledMemEfficientSDP()) {
    return static_cast<int64_t>(SDPBackend::efficient_attention);
  }
  return static_cast<int64_t>(SDPBackend::math);
}
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &choose_attention)

} // namespace native
} // namespace at
