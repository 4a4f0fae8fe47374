// The process group of the stand-in: its collectives run on gloo, on the device's memory, which is the host's.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <ATen/core/dispatch/Dispatcher.h>

at::Generator npu_default_generator(int64_t device);

namespace {

using c10d::Work;
using Group = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<at::Tensor>;

at::Tensor host(const at::Tensor& x) {
  static const auto view = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("npu_stand_in::host_view", "")
                               .typed<at::Tensor(const at::Tensor&)>();
  TORCH_CHECK(x.is_privateuseone(), "HCCL communicates tensors on npu devices, got one on ", x.device());
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  return view.call(x);
}

Tensors host(const Tensors& xs) {
  Tensors views;
  for (const auto& x : xs) {
    views.push_back(host(x));
  }
  return views;
}

std::vector<Tensors> host(const std::vector<Tensors>& xs) {
  std::vector<Tensors> views;
  for (const auto& x : xs) {
    views.push_back(host(x));
  }
  return views;
}

// A work that has ended.
struct Done final : Work {
  bool isCompleted() override {
    return true;
  }
  bool isSuccess() const override {
    return true;
  }
  bool wait(std::chrono::milliseconds) override {
    return true;
  }
};

struct Options final : c10d::Backend::Options {
  Options() : c10d::Backend::Options("hccl") {}
  bool is_high_priority_stream = false;
  std::vector<int64_t> global_ranks_in_group;
  std::string group_id;
};

struct ProcessGroupHCCL final : c10d::Backend {
  Group gloo;
  c10::intrusive_ptr<::Options> options;

  ProcessGroupHCCL(Group gloo, c10::intrusive_ptr<::Options> options)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo(std::move(gloo)), options(std::move(options)) {}

  const std::string getBackendName() const override {
    return "hccl";
  }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return options;
  }
  WorkPtr broadcast(Tensors& x, const c10d::BroadcastOptions& o) override {
    auto h = host(x);
    return gloo->broadcast(h, o);
  }
  WorkPtr allreduce(Tensors& x, const c10d::AllreduceOptions& o) override {
    auto h = host(x);
    return gloo->allreduce(h, o);
  }
  WorkPtr reduce(Tensors& x, const c10d::ReduceOptions& o) override {
    auto h = host(x);
    return gloo->reduce(h, o);
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& x, const c10d::AllgatherOptions& o) override {
    auto h = host(out);
    auto i = host(x);
    return gloo->allgather(h, i, o);
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& x, const c10d::AllgatherOptions& o) override {
    auto h = host(out), i = host(x);
    return gloo->_allgather_base(h, i, o);
  }
  WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& x, const c10d::ReduceScatterOptions& o) override {
    auto h = host(out);
    auto i = host(x);
    return gloo->reduce_scatter(h, i, o);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& x, const c10d::ReduceScatterOptions& o) override {
    auto h = host(out), i = host(x);
    return gloo->_reduce_scatter_base(h, i, o);
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& x, std::vector<int64_t>& to, std::vector<int64_t>& from,
                        const c10d::AllToAllOptions& o) override {
    auto h = host(out), i = host(x);
    return gloo->alltoall_base(h, i, to, from, o);
  }
  // Gloo has none of lists. It is composed of messages, which have arrived when this returns.
  WorkPtr alltoall(Tensors& out, Tensors& x, const c10d::AllToAllOptions&) override {
    constexpr int kTag = 1 << 20;
    std::vector<WorkPtr> works;
    for (int other = 0; other < getSize(); other++) {
      if (other == getRank()) {
        host(out[other]).copy_(host(x[other]));
      } else if (out[other].numel() > 0) {
        Tensors received{host(out[other])};
        works.push_back(gloo->recv(received, other, kTag));
      }
    }
    for (int other = 0; other < getSize(); other++) {
      if (other != getRank() && x[other].numel() > 0) {
        Tensors sent{host(x[other])};
        works.push_back(gloo->send(sent, other, kTag));
      }
    }
    for (auto& work : works) {
      work->wait();
    }
    return c10::make_intrusive<Done>();
  }
  WorkPtr send(Tensors& x, int rank, int tag) override {
    auto h = host(x);
    return gloo->send(h, rank, tag);
  }
  WorkPtr recv(Tensors& x, int rank, int tag) override {
    auto h = host(x);
    return gloo->recv(h, rank, tag);
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    return gloo->barrier(o);
  }
};

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::module_::import("torch._C._distributed_c10d");
  m.def("default_generator", npu_default_generator);
  py::class_<ProcessGroupHCCL, c10d::Backend, c10::intrusive_ptr<ProcessGroupHCCL>> group(m, "ProcessGroupHCCL");
  py::class_<::Options, c10d::Backend::Options, c10::intrusive_ptr<::Options>>(group, "Options")
      .def(py::init<>())
      .def_readwrite("is_high_priority_stream", &::Options::is_high_priority_stream)
      .def_readwrite("global_ranks_in_group", &::Options::global_ranks_in_group)
      .def_readwrite("group_id", &::Options::group_id);
  group.def_static("over", [](Group gloo, c10::intrusive_ptr<::Options> options) {
    return c10::make_intrusive<ProcessGroupHCCL>(std::move(gloo), std::move(options));
  });
  group.def_property_readonly("options", [](ProcessGroupHCCL& self) { return self.options; });
}
