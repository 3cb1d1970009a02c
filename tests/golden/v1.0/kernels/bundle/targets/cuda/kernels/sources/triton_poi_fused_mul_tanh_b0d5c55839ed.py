import triton
import triton.language as tl

from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math

@triton.jit
def triton_poi_fused_mul_tanh_b0d5c55839ed(in_ptr0, out_ptr0, ks0, xnumel, XBLOCK : tl.constexpr):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x0 = xindex
    tmp0 = tl.load(in_ptr0 + (x0), xmask)
    tmp1 = libdevice.tanh(tmp0)
    tmp2 = (ks0).to(tl.float32)
    tmp3 = (tmp2).to(tl.float32)
    tmp4 = tmp1 * tmp3
    tl.store(out_ptr0 + (x0), tmp4, xmask)
