// Exchanges KDTR files with Python: `make OUT`, `copy IN OUT`, or `check FILE...`, which prints a line a
// file.
#include <cmath>
#include <cstdio>
#include <limits>

#include "kdtr.hpp"

namespace {

using Blobs = std::map<std::string, std::vector<unsigned char>>;

// Reads as T, so that every type passes through its own std::vector.
template <class T>
kdtr::Array copied(kdtr::File& file, const kdtr::Entry& entry, Blobs& blobs) {
  const std::vector<T> data = file.read<T>(entry.name);
  std::vector<unsigned char>& blob = blobs[entry.name];
  const auto* bytes = reinterpret_cast<const unsigned char*>(data.data());
  if (!data.empty()) blob.assign(bytes, bytes + data.size() * sizeof(T));
  return {entry.dtype, entry.shape, blob.data(), blob.size()};
}

kdtr::Array copied(kdtr::File& file, const kdtr::Entry& entry, Blobs& blobs) {
  switch (entry.dtype) {
    case kdtr::DType::boolean: return copied<kdtr::Bool>(file, entry, blobs);
    case kdtr::DType::uint8: return copied<std::uint8_t>(file, entry, blobs);
    case kdtr::DType::int8: return copied<std::int8_t>(file, entry, blobs);
    case kdtr::DType::uint16: return copied<std::uint16_t>(file, entry, blobs);
    case kdtr::DType::int32: return copied<std::int32_t>(file, entry, blobs);
    case kdtr::DType::uint32: return copied<std::uint32_t>(file, entry, blobs);
    case kdtr::DType::int64: return copied<std::int64_t>(file, entry, blobs);
    case kdtr::DType::float16: return copied<kdtr::Float16>(file, entry, blobs);
    case kdtr::DType::bfloat16: return copied<kdtr::BFloat16>(file, entry, blobs);
    case kdtr::DType::float32: return copied<float>(file, entry, blobs);
    case kdtr::DType::float64: return copied<double>(file, entry, blobs);
  }
  throw std::logic_error("a type without a case");
}

void copy(const char* from, const char* to) {
  kdtr::File file(from);
  Blobs blobs;
  std::map<std::string, kdtr::Array> arrays;
  for (const kdtr::Entry& entry : file.entries()) arrays[entry.name] = copied(file, entry, blobs);
  kdtr::write(to, arrays, file.metadata());
}

void make(const char* path) {
  const std::vector<kdtr::Bool> bools{{1}, {0}, {1}, {1}};
  const std::vector<std::uint8_t> u8{0, 255};
  const std::vector<std::int8_t> i8{-128, 127};
  const std::vector<std::uint16_t> u16{0, 65535};
  const std::vector<std::int32_t> i32{std::numeric_limits<std::int32_t>::min(), -1, 0, 1, 2, 3};
  const std::vector<std::uint32_t> u32{0xffffffff};
  const std::vector<std::int64_t> i64{std::numeric_limits<std::int64_t>::min()};
  const std::vector<kdtr::Float16> f16{{0x3c00}, {0xfc00}};    // 1, −inf
  const std::vector<kdtr::BFloat16> bf16{{0x3f80}, {0xc040}};  // 1, −3
  const std::vector<float> f32{0.5f, -std::numeric_limits<float>::infinity()};
  const std::vector<double> f64{std::ldexp(1.0, -1074)};
  const std::vector<float> none;
  kdtr::write(path,
              {{"bool", kdtr::array(bools, {2, 2})},
               {"uint8", kdtr::array(u8)},
               {"int8", kdtr::array(i8)},
               {"uint16", kdtr::array(u16, {1, 2, 1})},
               {"int32", kdtr::array(i32, {2, 3})},
               {"uint32", kdtr::array(u32, {})},
               {"int64", kdtr::array(i64)},
               {"float16", kdtr::array(f16)},
               {"bfloat16", kdtr::array(bf16)},
               {"float32", kdtr::array(f32)},
               {"float64", kdtr::array(f64, {})},
               {"leer/空", kdtr::array(none, {3, 0})}},
              {{"writer", "C++"}, {"τ", "7½"}});
}

void check(const char* path) {
  try {
    kdtr::File(path).verify();
    std::puts("ok");
  } catch (const kdtr::Error& error) {
    std::printf("%llu %s\n", static_cast<unsigned long long>(error.offset()), error.what());
  }
}

// Arguments that write() must refuse, without leaving a file.
void refuse(const char* path) {
  const std::vector<float> two{1, 2};
  const std::vector<kdtr::Bool> bad{{2}};
  const std::vector<std::map<std::string, kdtr::Array>> cases{
      {{"", kdtr::array(two)}},       {{"\xff", kdtr::array(two)}},
      {{"a", kdtr::array(two, {3})}}, {{"a", kdtr::array(two, {std::uint64_t{1} << 62, 2})}},
      {{"a", kdtr::array(bad)}},      {{"a", kdtr::array(two, kdtr::Shape(65, 1))}}};
  for (const auto& arrays : cases) {
    try {
      kdtr::write(path, arrays);
      std::puts("accepted");
    } catch (const std::invalid_argument& error) { std::puts(error.what()); }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  try {
    if (command == "make" && argc == 3) return make(argv[2]), 0;
    if (command == "refuse" && argc == 3) return refuse(argv[2]), 0;
    if (command == "copy" && argc == 4) return copy(argv[2], argv[3]), 0;
    if (command == "check") {
      for (int i = 2; i < argc; ++i) check(argv[i]);
      return 0;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::fprintf(stderr, "usage: kdtr_exchange make OUT | refuse OUT | copy IN OUT | check FILE...\n");
  return 2;
}
