"""A pretended GPU: its tensors claim to be on cuda:0, but their values are on the CPU.

Like Torch, it refuses operands on two devices; unlike Torch's fake tensors, it has
values. A copy into pinned memory that is queued on a stream of its own arrives only
when the host waits for it; until then the memory holds NaN. CUDA's kernels, their
rounding, memory and speed are not pretended.

Torch lets no device be registered from Python, so inside the context this module
answers the queries of `torch.cuda`. Nothing in beatrice is replaced.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda:0")
_aten = torch.ops.aten
# A copy may involve both devices, and indices of any tensor may be on the host.
_COPIES = {_aten.copy_, _aten._to_copy, _aten.to}
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
_PINNING = {_aten._pin_memory, _aten.pin_memory}


class GpuTensor(torch.Tensor):
    """A tensor that claims to be on the GPU; `inner` holds its values.

    To Torch's own code it is a meta tensor, as a build without CUDA has no others.
    """

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)

    @staticmethod
    def __new__(cls, inner):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="meta",
        )
        tensor.inner = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _current[-1].compute(func, args, kwargs or {})

    def __deepcopy__(self, memo):
        copied = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        return memo.setdefault(id(self), copied)

    # Lists and numbers are converted as Torch converts them on a GPU.

    def __getitem__(self, index):
        return super().__getitem__(_without_lists(index))

    def __setitem__(self, index, value):
        if not isinstance(value, torch.Tensor):
            value = self.new_tensor(value)
        super().__setitem__(_without_lists(index), value)

    def new_tensor(self, values):
        return torch.tensor(values, dtype=self.dtype, device=DEVICE)

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self, **_):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def record_stream(self, stream):
        stream.recorded.append(self)


def _without_lists(index):
    if isinstance(index, tuple):
        return tuple(map(_without_lists, index))
    if not isinstance(index, list):
        return index
    return torch.tensor(index, dtype=None if index else torch.long)


class _Generator(torch.Generator):
    of_gpu = {}  # by the address that Torch passes on; kept, so that none is reused

    def __new__(cls, device="cpu"):
        generator = super().__new__(cls)
        if torch.device(device).type == "cuda":
            cls.of_gpu[generator._cdata] = generator
        return generator


class _Stream:
    def __init__(self, device=None):
        self.queue, self.recorded, self.has_waited = [], [], False

    def wait_stream(self, other):
        self.has_waited = True


class _Event:
    def record(self):
        self.stream = _current[-1].stream

    def synchronize(self):
        for host, values in self.stream.queue:
            if not any(values is recorded for recorded in self.stream.recorded):
                raise RuntimeError("memory that is copied may be given away meanwhile")
            host.copy_(values.inner)
        self.stream.queue.clear()


def _is_outline():
    """Return whether models are being made without weights, on the device "meta"."""
    devices = (getattr(m, "device", None) for m in _get_current_function_mode_stack())
    return torch.device("meta") in devices


def _is_host(tensor):
    return not isinstance(tensor, GpuTensor)


class PretendedGpu(TorchDispatchMode):
    """A context in which Torch has one or more GPUs, the first of which computes."""

    def __init__(self, capabilities=((9, 0),)):
        super().__init__()
        self.capabilities, self.stream = capabilities, _Stream()
        self.pinned = set()  # addresses of storages
        self.n_queued = 0  # copies for which the host did not wait at once
        self.seed = 0  # of the GPUs' generators
        self.n_forked = 0  # how often their state was asked for
        self.n_emptied = 0  # how often memory that Torch kept for later was returned

    def __enter__(self):
        self._patches = contextlib.ExitStack()
        fakes = {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "device_count": lambda: len(self.capabilities),
            "current_device": lambda: 0,
            "get_device_name": lambda device=None: "a pretended GPU",
            "get_device_capability": self._capability,
            "get_device_properties": lambda device=None: SimpleNamespace(
                total_memory=80 << 30, major=self._capability(device)[0]
            ),
            "mem_get_info": lambda device=None: (70 << 30, 80 << 30),
            "empty_cache": self._empty,
            "manual_seed": self._seed,
            "manual_seed_all": self._seed,
            "get_rng_state": self._fork,
            "set_rng_state": lambda state, device=None: self._seed(int(state)),
            "current_stream": lambda device=None: self.stream,
            "stream": self._switch,
            "Stream": _Stream,
            "Event": _Event,
            # Called by the optimisers of a Torch that was built for CUDA.
            "is_current_stream_capturing": lambda: False,
        }
        self._patches.enter_context(mock.patch.multiple(torch.cuda, **fakes))
        self._patches.enter_context(mock.patch.object(torch, "Generator", _Generator))
        # Likewise, from 2.14 on: without an accelerator no graph is being captured.
        none = {"current_accelerator": lambda check_available=False: None}
        self._patches.enter_context(mock.patch.multiple(torch.accelerator, **none))
        future = torch.__future__  # a parameter's data cannot be set: it has none
        before = future.get_overwrite_module_params_on_conversion()
        self._patches.callback(future.set_overwrite_module_params_on_conversion, before)
        future.set_overwrite_module_params_on_conversion(True)
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        self._patches.callback(torch._C._set_only_lift_cpu_tensors, before)
        _current.append(self)
        self._patches.callback(_current.pop)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._patches.close()

    def _capability(self, device=0):
        index = device if isinstance(device, int) else torch.device(device).index
        return self.capabilities[index]

    def _seed(self, seed):
        self.seed = seed

    def _empty(self):
        self.n_emptied += 1

    def _fork(self, device=None):
        self.n_forked += 1
        return torch.tensor(self.seed)

    @contextlib.contextmanager
    def _switch(self, stream):
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream, stream.has_waited = before, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.compute(func, args, kwargs or {})

    def compute(self, func, args, kwargs):
        """Compute on the host; the result claims the device that Torch would choose."""
        leaves, kind = tree_flatten((args, kwargs))[0], func.overloadpacket
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._check_devices(func, args, kwargs, tensors)
        on_gpu = not all(map(_is_host, tensors))
        for device in (leaf for leaf in leaves if isinstance(leaf, torch.device)):
            if device.type == "meta" and _is_outline():
                return func(*args, **kwargs)
            on_gpu = device.type != "cpu"
        if kind is _aten.copy_:
            on_gpu = not _is_host(args[0])
            if self._is_queued(*args, **kwargs):
                return args[0]
        if kind is _aten.is_pinned:
            return False
        if kind in _PINNING:
            return self._pinned(args[0].clone())
        is_pinned = kwargs.pop("pin_memory", None)
        owners = {id(t.inner): t for t in tensors if isinstance(t, GpuTensor)}

        def bare(leaf):
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            return leaf.inner if isinstance(leaf, GpuTensor) else leaf

        def wrapped(leaf):
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if is_pinned:  # nothing may be read before it has arrived
                values = torch.nan if leaf.is_floating_point() else -1
                return self._pinned(leaf.fill_(values))
            if id(leaf) in owners:  # what was computed in place
                return owners[id(leaf)]
            if not on_gpu:
                return leaf
            # In inference mode a view is an inference tensor only if its base is.
            is_kept = not func.is_view or tensors[0].is_inference()
            with torch.inference_mode(is_kept and torch.is_inference_mode_enabled()):
                return GpuTensor(leaf)

        compute = _OF_CUDA.get(func, func)
        result = compute(*tree_map(bare, args), **tree_map(bare, kwargs))
        if kind in _COPIES and kind is not _aten.copy_ and _is_host(args[0]) == on_gpu:
            result = result.clone()  # the host's own copy of it
        return tree_map(wrapped, result)

    def _pinned(self, tensor):
        self.pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def _check_devices(self, func, args, kwargs, tensors):
        generator, kind = kwargs.get("generator"), func.overloadpacket
        if generator is not None:
            device = torch.device(kwargs.get("device") or "cpu")
            if (device.type != "cpu") != (generator._cdata in _Generator.of_gpu):
                raise RuntimeError(f"{func}: a generator of another device")
        if kind in _COPIES:
            return
        if kind in _INDEXING:
            indices = [index for index in args[1] if index is not None]
            if _is_host(args[0]) and not all(map(_is_host, indices)):
                raise RuntimeError(f"{func}: indices on the GPU, values on the host")
            tensors = [args[0], *args[2:3]]
        homes = {_is_host(t) for t in tensors if t.ndim or not _is_host(t)}
        is_written = func._schema.is_mutable and tensors and _is_host(tensors[0])
        if len(homes) > 1 or (is_written and False in homes):
            shapes = [(t.device.type, tuple(t.shape)) for t in tensors]
            raise RuntimeError(f"{func}: tensors on two devices, {shapes}")

    def _is_queued(self, host, values, non_blocking=False):
        """Queue a copy if it runs while the host goes on; return whether it does."""
        if not (non_blocking and _is_host(host)) or _is_host(values):
            return False
        if host.untyped_storage().data_ptr() not in self.pinned:
            return False
        if not self.stream.has_waited:
            raise RuntimeError("a copy may begin before its values are computed")
        self.stream.queue.append((host, values))
        self.n_queued += 1
        return True


def _wide_product(left, right, out_dtype, *, out=None):
    """Only on CUDA: a product of 16-bit floats that is summed in float32."""
    assert left.dtype == right.dtype != torch.float32 == out_dtype
    assert out is None or out.dtype == out_dtype
    return torch.mm(left.float(), right.float(), out=out)


def _counts_of_integers(values, bins=100, min=0, max=0):
    """Only on CUDA: a histogram by which mixtures of experts count tokens."""
    return torch.histc(values.float(), bins, min, max).to(values.dtype)


_OF_CUDA = {
    _aten.mm.dtype: _wide_product,
    _aten.mm.dtype_out: _wide_product,
    _aten.histc.default: _counts_of_integers,
}
_current = []
