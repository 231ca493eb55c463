// The rotation by an angle.
#pragma once

#include "common.cuh"

// Cosine and sine of an angle of any size. The turns are taken off in two parts of 2 pi, so that the rest is as good as
// the angle is; the library's own reduction would need local memory.
__device__ __forceinline__ void turn(double angle, double& cosine, double& sine)
{
    const double turns = rint(angle * 0.15915494309189535);  // 1 / (2 pi)
    double rest = fma(-turns, 6.283185307179586, angle);
    rest = fma(-turns, 2.4492935982947064e-16, rest);
    sincospi(rest * 0.3183098861837907, &sine, &cosine);
}
