"""Attention calls through PyTorch, timed: its scaled_dot_product_attention by backend, and unfused `standard`.

A call is timed by CUDA events, with a fill of 256 MiB before each so that the L2 holds none of its tensors.  What it
holds at its peak is counted beyond what was allocated before: in a backward, also the gradients of the one before it,
which it releases.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from iosim.gpu.device import FLUSH_BYTES, Load, load_torch
from iosim.study.measure import WORDS, Call, CallError, Timed

if TYPE_CHECKING:
    from iosim.problem import Attention

BACKENDS = {"flash2": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
LEAST_RUNS, MOST_RUNS, MS = 7, 50, 100.0  # runs of a call: as many as take about MS
ROOM = 0.8  # of the free memory, from which a call's tensors are cut when its peak is taken
ROWS = 32  # query rows that are checked, of the first and of the last head
TOLERANCE = 0.02  # of the norm: half precision is off by 0.001, another mask by more than 0.1


class AttentionCalls:
    """A `Caller` on the current GPU.  Raises InputError where there is no PyTorch or no GPU."""

    def __init__(self, load: Load = import_module) -> None:
        self._torch = load_torch(load)
        self._flush = self._torch.empty(FLUSH_BYTES, dtype=self._torch.uint8, device="cuda")

    @property
    def device(self) -> str:
        """What the GPU calls itself."""
        return str(self._torch.cuda.get_device_name())

    def time(self, call: Call) -> Timed:
        """Run, check and time one call."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                return self._time(call)
            except RuntimeError as error:  # out of memory, too
                reasons = [str(w.message) for w in said if "sdp" in str(w.message)]
                raise CallError(_first_line(str(error), reasons)) from None
            finally:
                self._torch.cuda.empty_cache()

    def _time(self, call: Call) -> Timed:
        torch, a = self._torch, call.problem
        torch.manual_seed(0)
        backward = call.direction == "backward"

        def tensor(heads: int, n: int) -> Any:
            made = torch.randn(a.batch, heads, n, a.d, device="cuda", dtype=getattr(torch, WORDS[a.dtype]))
            return made.requires_grad_(backward)

        inputs = tensor(a.heads, a.n_q), tensor(a.kv_heads, a.n_k), tensor(a.kv_heads, a.n_k)
        out = self._forward(call, *inputs)
        align = self._alignment(a, out.detach(), *(t.detach() for t in inputs))
        if backward:
            run = self._backward(out, inputs)
        else:
            del out

            def run() -> object:
                return self._forward(call, *inputs)

        times, peak = self._times(run), self._peak(run)
        p20, p50, p80 = (float(v) for v in torch.tensor(times).quantile(torch.tensor([0.2, 0.5, 0.8])))
        return Timed(p50, p20, p80, peak, align)

    def _forward(self, call: Call, q: Any, k: Any, v: Any) -> Any:
        torch, a = self._torch, call.problem
        if call.implementation == "standard":
            if a.causal or a.group > 1:
                raise CallError("standard has no causal mask and no grouped heads here")
            scores = torch.matmul(q * a.d**-0.5, k.transpose(-2, -1))
            return torch.matmul(torch.softmax(scores, dim=-1), v)
        attention = torch.nn.attention
        with attention.sdpa_kernel([getattr(attention.SDPBackend, BACKENDS[call.implementation])]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=a.causal, enable_gqa=a.group > 1)

    def _backward(self, out: Any, inputs: tuple[Any, ...]) -> Callable[[], object]:
        upstream = self._torch.randn(out.shape, device="cuda", dtype=out.dtype)

        def run() -> None:
            for tensor in inputs:
                tensor.grad = None
            out.backward(upstream, retain_graph=True)

        return run

    def _times(self, run: Callable[[], object]) -> list[float]:
        event = self._torch.cuda.Event
        times: list[float] = []
        count = 3  # warm, and say how long a run takes
        for more in (False, True):
            pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(count)]
            for start, stop in pairs:
                self._flush.zero_()
                start.record()
                run()
                stop.record()
            self._torch.cuda.synchronize()
            times = [start.elapsed_time(stop) for start, stop in pairs]
            if not more:
                count = max(LEAST_RUNS, min(MOST_RUNS, int(MS / min(times))))
        return times

    def _peak(self, run: Callable[[], object]) -> int:
        """Bytes, to the allocator's granule: what it takes is cut from one large free block.

        Where it asks the device for a block of its own, it takes whole 2 MiB.
        """
        cuda = self._torch.cuda
        cuda.empty_cache()
        room = self._torch.empty(int(ROOM * cuda.mem_get_info()[0]), dtype=self._torch.uint8, device="cuda")
        del room
        before = cuda.memory_allocated()
        cuda.reset_peak_memory_stats()
        run()
        cuda.synchronize()
        return int(cuda.max_memory_allocated() - before)

    def _alignment(self, a: Attention, out: Any, q: Any, k: Any, v: Any) -> str:
        """Which causal alignment the numbers are of ("" without a mask); raises CallError where they are of none.

        With as many queries as keys both are one, and it goes by PyTorch's word for is_causal, top-left.
        """
        candidates = ("",) if not a.causal else ("top-left",) if a.n_q == a.n_k else ("top-left", "bottom-right")
        errors = {align: self._error(a, align, out, q, k, v) for align in candidates}
        best = min(errors, key=lambda align: errors[align])
        if not errors[best] <= TOLERANCE:
            raise CallError(f"its numbers are {100 * errors[best]:.1f} % off a float32 computation")
        return best

    def _error(self, a: Attention, align: str, out: Any, q: Any, k: Any, v: Any) -> float:
        """Norm of the difference from float32 on some rows of two heads, over the norm."""
        torch = self._torch
        rows = torch.linspace(0, a.n_q - 1, min(ROWS, a.n_q), device="cuda").long()
        off = size = 0.0
        for batch, head in {(0, 0), (a.batch - 1, a.heads - 1)}:
            keys, values = (t[batch, head // a.group].float() for t in (k, v))
            scores = q[batch, head, rows].float() @ keys.T * a.d**-0.5
            if align:
                shift = a.n_k - a.n_q if align == "bottom-right" else 0
                hidden = torch.arange(a.n_k, device="cuda")[None, :] > rows[:, None] + shift
                scores = scores.masked_fill(hidden, float("-inf"))
            exact = torch.softmax(scores, dim=-1).nan_to_num(0.0) @ values
            off += float((out[batch, head, rows].float() - exact).square().sum())
            size += float(exact.square().sum())
        return float((off / max(size, 1e-30)) ** 0.5)


def _first_line(error: str, reasons: list[str]) -> str:
    """What PyTorch said: why the backend refused, if it did, or the first line of its error."""
    known = [r for r in reasons if "not used because" not in r and "runtime disabled" not in r]
    text = known[0] if known else error
    return " ".join(text.splitlines()[0].split(" (Triggered internally")[0].split())[:200] or "no reason given"
