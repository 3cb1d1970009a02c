import triton
import triton.language as tl

from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math

@triton.jit
def triton_poi_fused_mul_tanh_tanh_backward_958fba5da263(in_ptr0, in_ptr1, out_ptr0, ks0, xnumel, XBLOCK : tl.constexpr):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x0 = xindex
    tmp0 = tl.load(in_ptr0 + (x0), xmask)
    tmp4 = tl.load(in_ptr1 + (x0), xmask)
    tmp1 = (ks0).to(tl.float32)
    tmp2 = (tmp1).to(tl.float32)
    tmp3 = tmp0 * tmp2
    tmp5 = libdevice.tanh(tmp4)
    tmp6 = tmp5 * tmp5
    tmp7 = tl.full([1], 1.0, tl.float32)
    tmp8 = tmp7 - tmp6
    tmp9 = tmp3 * tmp8
    tl.store(out_ptr0 + (x0), tmp9, xmask)
