// Logarithm, exponential and random words that are the same everywhere: what reference/portable_math.py and
// reference/philox.py say, in the same sequence of float64 operations. The program must be compiled with --fmad=false:
// a fused multiplication and addition rounds once, which changes last bits.
#pragma once

#include "common.cuh"

constexpr double LN2_HIGH = 6.93147180369123816490e-01, LN2_LOW = 1.90821492927058770002e-10;

// a / b, rounded once, where neither is near the ends of the type: what the compiler makes of a division, but for the
// branch to the other cases. b is inverted by the usual iteration; then one correction by the exact remainder.
__device__ __forceinline__ double divided(double a, double b)
{
    double y;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(b));
    double error = __fma_rn(-b, y, 1.0);
    error = __fma_rn(error, error, error);
    y = __fma_rn(y, error, y);
    y = __fma_rn(y, __fma_rn(-b, y, 1.0), y);
    const double quotient = a * y;
    return __fma_rn(y, __fma_rn(-b, quotient, a), quotient);
}

// The logarithm of a positive, finite, normal x.
__device__ __forceinline__ double portable_log(double x)
{
    const int64 bits = __double_as_longlong(x);
    int64 exponent = ((bits >> 52) & 0x7FF) - 1022;
    double mantissa = __longlong_as_double((bits & 0xFFFFFFFFFFFFF) | (1022ll << 52));  // in [0.5, 1)
    if (mantissa < 0.7071067811865476) {
        mantissa = 2.0 * mantissa;
        exponent -= 1;
    }
    const double k = double(exponent), f = mantissa - 1.0, s = divided(f, 2.0 + f), z = s * s;
    double r = 1.479819860511658591e-01 * z;
    r = (r + 1.531383769920937332e-01) * z;
    r = (r + 1.818357216161805012e-01) * z;
    r = (r + 2.222219843214978396e-01) * z;
    r = (r + 2.857142874366239149e-01) * z;
    r = (r + 3.999999999940941908e-01) * z;
    r = (r + 6.666666666666735130e-01) * z;
    const double half = 0.5 * f * f;
    return k * LN2_HIGH - ((half - (s * (half + r) + k * LN2_LOW)) - f);
}

// The exponential of x between -708 and 0.
__device__ __forceinline__ double portable_exp(double x)
{
    const double k = rint(x * 1.44269504088896338700);
    const double high = x - k * LN2_HIGH, low = k * LN2_LOW, r = high - low, z = r * r;
    double c = 4.13813679705723846039e-08 * z;
    c = (c + -1.65339022054652515390e-06) * z;
    c = (c + 6.61375632143793436117e-05) * z;
    c = (c + -2.77777777770155933842e-03) * z;
    c = (c + 1.66666666666666019037e-01) * z;
    c = r - c;
    const double y = 1.0 - ((low - divided(r * c, 2.0 - c)) - high);
    return y * __longlong_as_double((int64(k) + 1023) << 52);  // times 2 to the k
}

// The four words of Philox4x32-10.
__device__ __forceinline__ uint4 philox(uint4 counter, uint32 key0, uint32 key1)
{
#pragma unroll
    for (int32 round = 0; round < 10; ++round) {
        const uint64 p0 = uint64(0xD2511F53u) * counter.x, p1 = uint64(0xCD9E8D57u) * counter.z;
        counter = {uint32(p1 >> 32) ^ counter.y ^ key0, uint32(p1), uint32(p0 >> 32) ^ counter.w ^ key1, uint32(p0)};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

// Standard Gumbel noise made of a random word.
__device__ __forceinline__ double gumbel(uint32 word)
{
    const double uniform = (double(word) + 0.5) * 0x1p-32;  // inside (0, 1), and exact
    return -portable_log(-portable_log(uniform));
}

// Whether z and the noise of a word are surely below a threshold, judged in float32 with a relative error of 1e-5. The
// noise is -log(t) with t = -log(1 - d), and t >= d = 1 - uniform; it lifts z to the threshold if t is at most
// e^(z - threshold).
__device__ __forceinline__ bool loses(float z, uint32 word, float threshold)
{
    return float(~word) * 0x1p-32f > __expf(z - threshold);
}
