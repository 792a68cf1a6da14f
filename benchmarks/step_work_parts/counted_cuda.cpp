// Copyright (c) the torchtitan-grpo authors.
// SPDX-License-Identifier: BSD-3-Clause

// A CUDA device that computes nothing, for a build of torch without CUDA. Torch has fake tensors on CUDA
// without it, but autograd asks a device for its index, streams and events, and aborts without an answer.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;

struct CountedGuard : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return {DeviceType::CUDA, 0}; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Stream getStream(Device) const noexcept override {
    return Stream(Stream::DEFAULT, {DeviceType::CUDA, 0});
  }
  Stream exchangeStream(Stream) const noexcept override { return getStream(getDevice()); }
  void record(void**, const Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
};

static CountedGuard guard;
static c10::impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, &guard);

namespace at {
struct CountedHooks : CUDAHooksInterface {
  explicit CountedHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", CountedHooks)
}  // namespace at
