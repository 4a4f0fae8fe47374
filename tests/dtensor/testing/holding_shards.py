"""A pytest plugin that makes DTensors of the NumPy platform hold their shards, instead of being them."""

from hp_platform_numpy import module, platform
from hp_platform_numpy.platform import NumpyPlatform
from hp_platform_numpy.tensor import Tensor

from hp_dtensor.spec.tensor_spec import grad_spec
from hp_dtensor.tensor.dtensor import DTensor


class Holding(DTensor, Tensor):
    """A DTensor that holds its shard in `local`; what follows from its spec is right, and it has no data."""

    local: Tensor
    shape = property(lambda self: self._spec.shape)
    dtype = property(lambda self: self.local.dtype)
    data = property(lambda self: None)


def wrap(self, local, spec):
    made = Holding.__new__(Holding)
    made.local, made._spec = local, spec
    return made


def local_of(x):
    return x.local if isinstance(x, Holding) else x


def parameter(x, requires_grad=True):
    if not isinstance(x, Holding):
        return module.parameter(x, requires_grad)
    made = wrap(None, module.parameter(x.local, requires_grad), x._spec)
    made.is_parameter = True
    return made


def get_grad(self, x):
    grad = local_of(x).grad
    return wrap(None, grad, grad_spec(x._spec)) if isinstance(x, Holding) and grad is not None else grad


def grad(self, outputs, inputs, output_grads=None, own=NumpyPlatform.grad):
    found = own(self, outputs, [local_of(x) for x in inputs], output_grads)
    pairs = zip(inputs, found, strict=True)
    return [wrap(None, g, grad_spec(x._spec)) if isinstance(x, Holding) and g is not None else g for x, g in pairs]


NumpyPlatform.grad = grad
NumpyPlatform.DTensor = platform.NumpyDTensor = Holding
NumpyPlatform.wrap = wrap
NumpyPlatform.unwrap = lambda self, x: local_of(x)
NumpyPlatform.Parameter = staticmethod(parameter)
NumpyPlatform.get_grad = get_grad
for name in ("requires_grad", "is_leaf", "set_requires_grad", "set_grad"):

    def method(self, x, *args, own=getattr(NumpyPlatform, name)):
        return own(self, local_of(x), *map(local_of, args))

    setattr(NumpyPlatform, name, method)
