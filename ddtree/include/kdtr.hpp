// KDTR files in C++17: named arrays and string metadata, checksummed, shared with Python's ddtree.kdtr.
//
// The docstring of ddtree/kdtr.py describes the format; the checks here are the same, in the same order.
//
//     kdtr::write("a.kdtr", {{"ids", kdtr::array(ids, {2, 3})}}, {{"drafter", "oracle"}});
//     kdtr::File file("a.kdtr");
//     std::vector<float> scores = file.read<float>("scores");    // its shape: file.entry("scores").shape
//
// A damaged file raises kdtr::Error, wrong arguments std::invalid_argument, the system std::system_error.
#pragma once

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

namespace kdtr {

// One byte, 0 or 1: std::vector<bool> has no bytes to read into.
struct Bool {
  std::uint8_t value;
};
// Bit patterns: C++17 has no such types.
struct Float16 {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

enum class DType : std::uint8_t {
  boolean = 1,
  uint8,
  int8,
  uint16,
  int32,
  uint32,
  int64,
  float16,
  bfloat16,
  float32,
  float64
};

using Shape = std::vector<std::uint64_t>;
using Metadata = std::map<std::string, std::string>;

// A damaged file; offset() is the byte where it is wrong.
class Error : public std::runtime_error {
 public:
  Error(const std::string& message, std::uint64_t offset)
      : std::runtime_error(message + " (at byte " + std::to_string(offset) + ")"),
        offset_(offset) {}
  std::uint64_t offset() const noexcept { return offset_; }

 private:
  std::uint64_t offset_;
};

namespace detail {

constexpr std::array<unsigned char, 8> magic{0x89, 'K', 'D', 'T', 'R', '\r', '\n', 0x1a};
constexpr std::uint32_t version = 1;
constexpr std::uint64_t alignment = 64, header_size = 64, entry_size = 24, pair_size = 8, max_rank = 64;
constexpr std::uint64_t extent_limit = std::uint64_t{1} << 63;
constexpr std::size_t chunk = std::size_t{1} << 20;

using Bytes = std::vector<unsigned char>;

// `position` is at most 2^64 - 64 wherever this is called: file sizes stay below 2^63
constexpr std::uint64_t aligned(std::uint64_t position) {
  return (position + alignment - 1) / alignment * alignment;
}

// Shifts, not casts: right on machines of either byte order.
inline std::uint64_t load(const unsigned char* from, int bytes) {
  std::uint64_t value = 0;
  for (int i = bytes; i-- > 0;) value = value << 8 | from[i];
  return value;
}

inline void store(Bytes& to, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i, value >>= 8) to.push_back(static_cast<unsigned char>(value & 0xff));
}

inline bool little_endian() {
  const std::uint16_t one = 1;
  unsigned char first;
  std::memcpy(&first, &one, 1);
  return first == 1;
}

// Between the file's byte order and the machine's.
inline void to_native(unsigned char* data, std::size_t bytes, std::size_t item) {
  if (little_endian()) return;
  for (std::size_t i = 0; i < bytes; i += item) std::reverse(data + i, data + i + item);
}

// zlib's CRC-32, eight bytes a step: table[k][b] is the CRC of byte b followed by k zero bytes.
using CrcTables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr CrcTables crc_tables() {
  CrcTables table{};
  for (std::uint32_t b = 0; b < 256; ++b) {
    std::uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0u);
    table[0][b] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k)
    for (std::size_t b = 0; b < 256; ++b)
      table[k][b] = table[k - 1][b] >> 8 ^ table[0][table[k - 1][b] & 0xff];
  return table;
}

inline std::uint32_t crc32(const unsigned char* data, std::size_t bytes, std::uint32_t before = 0) {
  static constexpr CrcTables t = crc_tables();
  std::uint32_t crc = ~before;
  for (; bytes >= 8; bytes -= 8, data += 8) {
    crc = t[7][(crc ^ data[0]) & 255] ^ t[6][(crc >> 8 ^ data[1]) & 255] ^ t[5][(crc >> 16 ^ data[2]) & 255] ^
          t[4][crc >> 24 ^ data[3]] ^ t[3][data[4]] ^ t[2][data[5]] ^ t[1][data[6]] ^ t[0][data[7]];
  }
  for (; bytes > 0; --bytes, ++data) crc = crc >> 8 ^ t[0][(crc ^ *data) & 0xff];
  return ~crc;
}

// Strict: no surrogates, no overlong forms, nothing above U+10FFFF.
inline bool is_utf8(const std::string& text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto byte = [&](std::size_t k) { return static_cast<unsigned char>(text[k]); };
    const unsigned char lead = byte(i);
    if ((lead >= 0x80 && lead < 0xc2) || lead > 0xf4) return false;
    const std::size_t more = lead < 0x80 ? 0 : lead < 0xe0 ? 1 : lead < 0xf0 ? 2 : 3;
    if (more >= text.size() - i) return false;
    for (std::size_t k = 1; k <= more; ++k)
      if (byte(i + k) >> 6 != 2) return false;
    if (more > 1) {
      const unsigned char next = byte(i + 1);
      if ((lead == 0xe0 && next < 0xa0) || (lead == 0xed && next >= 0xa0) || (lead == 0xf0 && next < 0x90) ||
          (lead == 0xf4 && next >= 0x90))
        return false;
    }
    i += more + 1;
  }
  return true;
}

inline std::string hex(std::uint64_t value, int digits = 8) {
  std::string text;
  for (int i = digits; i-- > 0;) text += "0123456789abcdef"[value >> (4 * i) & 15];
  return text;
}

inline std::string in_quotes(const std::string& name) { return "'" + name + "'"; }

template <class T>
struct Code;
template <>
struct Code<Bool> : std::integral_constant<DType, DType::boolean> {};
template <>
struct Code<std::uint8_t> : std::integral_constant<DType, DType::uint8> {};
template <>
struct Code<std::int8_t> : std::integral_constant<DType, DType::int8> {};
template <>
struct Code<std::uint16_t> : std::integral_constant<DType, DType::uint16> {};
template <>
struct Code<std::int32_t> : std::integral_constant<DType, DType::int32> {};
template <>
struct Code<std::uint32_t> : std::integral_constant<DType, DType::uint32> {};
template <>
struct Code<std::int64_t> : std::integral_constant<DType, DType::int64> {};
template <>
struct Code<Float16> : std::integral_constant<DType, DType::float16> {};
template <>
struct Code<BFloat16> : std::integral_constant<DType, DType::bfloat16> {};
template <>
struct Code<float> : std::integral_constant<DType, DType::float32> {};
template <>
struct Code<double> : std::integral_constant<DType, DType::float64> {};

}  // namespace detail

inline const char* name(DType dtype) {
  static constexpr std::array<const char*, 11> names{"bool",     "uint8",   "int8",   "uint16",
                                                     "int32",    "uint32",  "int64",  "float16",
                                                     "bfloat16", "float32", "float64"};
  return names.at(static_cast<std::size_t>(dtype) - 1);
}

inline std::size_t item_size(DType dtype) {
  static constexpr std::array<std::size_t, 11> sizes{1, 1, 1, 2, 4, 4, 8, 2, 2, 4, 8};
  return sizes.at(static_cast<std::size_t>(dtype) - 1);
}

struct Entry {
  std::string name;
  DType dtype;
  Shape shape;
  std::uint64_t offset, bytes;
  std::uint32_t crc32;
};

// A file open for reading; header, index and metadata are checked when it is opened, data when they are read.
class File {
 public:
  explicit File(const std::filesystem::path& path) : path_(path) {
    std::error_code code;
    size_ = std::filesystem::file_size(path, code);  // an error for anything but a regular file
    if (code) throw std::system_error(code, path.string());
    stream_.open(path, std::ios::binary);
    if (!stream_) throw std::system_error(errno, std::generic_category(), path.string());
    read_contents();
  }

  // ascending by name
  const std::vector<Entry>& entries() const noexcept { return entries_; }
  const Metadata& metadata() const noexcept { return metadata_; }

  const Entry& entry(const std::string& name) const {
    const auto found =
        std::lower_bound(entries_.begin(), entries_.end(), name,
                         [](const Entry& entry, const std::string& key) { return entry.name < key; });
    if (found == entries_.end() || found->name != name)
      throw std::invalid_argument("no array " + detail::in_quotes(name) + " in " + path_.string());
    return *found;
  }

  // One array's elements in C order, checked.
  template <class T>
  std::vector<T> read(const std::string& name) {
    static_assert(std::is_trivially_copyable_v<T>);
    const Entry& found = entry(name);
    if (found.dtype != detail::Code<T>::value)
      throw std::invalid_argument(detail::in_quotes(name) + " is " + kdtr::name(found.dtype) +
                                  ", it was read as " + kdtr::name(detail::Code<T>::value));
    std::vector<T> data(static_cast<std::size_t>(found.bytes / sizeof(T)));
    read_bytes(found, reinterpret_cast<unsigned char*>(data.data()));
    return data;
  }

  // Check the data and the padding of every array, a chunk at a time.
  void verify() {
    for (const Entry& entry : entries_) read_bytes(entry, nullptr);
  }

 private:
  [[noreturn]] void fail(const std::string& message, std::uint64_t offset) const {
    throw Error(path_.string() + ": " + message, offset);
  }

  void fill(std::uint64_t offset, unsigned char* data, std::size_t bytes) {
    stream_.clear();
    stream_.seekg(static_cast<std::streamoff>(offset));
    stream_.read(reinterpret_cast<char*>(data), static_cast<std::streamsize>(bytes));
    if (static_cast<std::size_t>(stream_.gcount()) != bytes)
      fail("the file ends here, although it was longer when it was opened",
           offset + static_cast<std::uint64_t>(stream_.gcount()));
  }

  void check_zeros(const unsigned char* data, std::size_t bytes, std::uint64_t offset) const {
    for (std::size_t i = 0; i < bytes; ++i)
      if (data[i] != 0) fail("padding is not zero", offset + i);
  }

  // `data` may be null: then only check.
  void read_bytes(const Entry& entry, unsigned char* data) {
    const auto bytes = static_cast<std::size_t>(entry.bytes);
    detail::Bytes scratch(data ? 0 : std::min(bytes, detail::chunk));
    std::uint32_t crc = 0;
    unsigned char top = 0;
    for (std::size_t start = 0; start < bytes; start += detail::chunk) {
      const std::size_t count = std::min(detail::chunk, bytes - start);
      unsigned char* block = data ? data + start : scratch.data();
      fill(entry.offset + start, block, count);
      crc = detail::crc32(block, count, crc);
      if (entry.dtype == DType::boolean) top = std::max(top, *std::max_element(block, block + count));
      detail::to_native(block, count, item_size(entry.dtype));
    }
    if (crc != entry.crc32)
      fail("the data of " + detail::in_quotes(entry.name) + " have CRC-32 " + detail::hex(crc) +
               ", the index says " + detail::hex(entry.crc32),
           entry.offset);
    if (top > 1)
      fail("the data of " + detail::in_quotes(entry.name) + " hold a byte " + std::to_string(top) +
               ", a bool is 0 or 1",
           entry.offset);
    const std::uint64_t end = entry.offset + entry.bytes;
    std::array<unsigned char, detail::alignment> padding;
    const auto count = static_cast<std::size_t>(detail::aligned(end) - end);
    fill(end, padding.data(), count);
    check_zeros(padding.data(), count, end);
  }

  void read_contents() {
    using namespace detail;
    const auto text = [](std::uint64_t number) { return std::to_string(number); };
    if (size_ < header_size)
      fail(text(size_) + " bytes are too few for a header of " + text(header_size), size_);
    Bytes contents(header_size);
    fill(0, contents.data(), header_size);
    const auto field = [&](std::size_t offset, int bytes) { return load(contents.data() + offset, bytes); };
    if (!std::equal(magic.begin(), magic.end(), contents.begin()))
      fail("not a KDTR file: its first bytes are not the magic", 0);
    if (field(8, 4) != version)
      fail("version is " + text(field(8, 4)) + ", this reader knows " + text(version), 8);
    const std::uint32_t header_crc = crc32(contents.data(), 60);
    if (header_crc != field(60, 4))
      fail("the header has CRC-32 " + hex(header_crc) + ", it says " + hex(field(60, 4)), 60);
    check_zeros(contents.data() + 48, 12, 48);
    const std::uint64_t n_arrays = field(12, 4), n_file = field(16, 8), n_index = field(24, 8),
                        n_metadata = field(32, 8), n_pairs = field(40, 4), contents_crc = field(44, 4);
    if (size_ < n_file) fail("truncated: " + text(size_) + " of " + text(n_file) + " bytes are left", size_);
    if (size_ > n_file) fail(text(size_ - n_file) + " bytes follow the end of the file", n_file);
    // each of these is below the file's size before it is added to anything
    if (n_index > size_ - header_size)
      fail("an index of " + text(n_index) + " bytes does not fit in a file of " + text(size_), 24);
    const std::uint64_t index_end = header_size + n_index;
    if (n_metadata > size_ - index_end)
      fail("metadata of " + text(n_metadata) + " bytes do not fit in a file of " + text(size_), 32);
    const std::uint64_t contents_end = index_end + n_metadata, data_start = aligned(contents_end);
    if (data_start > size_)
      fail("truncated: the padding after the metadata ends at " + text(data_start), size_);
    if (n_arrays > n_index / entry_size)
      fail(text(n_arrays) + " arrays do not fit in an index of " + text(n_index) + " bytes", 12);
    if (n_pairs > n_metadata / pair_size)
      fail(text(n_pairs) + " pairs do not fit in metadata of " + text(n_metadata) + " bytes", 40);
    contents.resize(static_cast<std::size_t>(data_start));
    fill(0, contents.data(), contents.size());
    const std::uint32_t crc =
        crc32(contents.data() + header_size, static_cast<std::size_t>(contents_end - header_size));
    if (crc != contents_crc)
      fail("index and metadata have CRC-32 " + hex(crc) + ", the header says " + hex(contents_crc), 44);
    check_zeros(contents.data() + contents_end, static_cast<std::size_t>(data_start - contents_end),
                contents_end);
    parse_index(contents, n_arrays, index_end, data_start);
    parse_metadata(contents, n_pairs, index_end, contents_end);
  }

  void parse_index(const detail::Bytes& contents, std::uint64_t count, std::uint64_t end,
                   std::uint64_t place) {
    using namespace detail;
    std::uint64_t position = header_size;
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::string which = "array " + std::to_string(i);
      check_room(position, entry_size, end, which + "'s record ends past the index");
      const auto field = [&](std::uint64_t offset, int bytes) {
        return load(contents.data() + position + offset, bytes);
      };
      const std::uint64_t n_name = field(20, 2), code = field(22, 1), rank = field(23, 1);
      if (code < 1 || code > 11)
        fail(which + " has type " + std::to_string(code) + ", types are 1 to 11", position + 22);
      if (rank > max_rank)
        fail(which + " has rank " + std::to_string(rank) + ", at most 64 is allowed", position + 23);
      const std::uint64_t shape_at = position + entry_size, name_at = shape_at + 8 * rank;
      check_room(shape_at, 8 * rank + n_name, end, which + "'s name ends past the index");
      if (n_name == 0) fail(which + "'s name is empty", position + 20);
      Entry entry{utf8(contents, name_at, n_name, which + "'s name"),
                  static_cast<DType>(code),
                  {},
                  field(0, 8),
                  field(8, 8),
                  static_cast<std::uint32_t>(field(16, 4))};
      const std::string name = in_quotes(entry.name);
      if (!entries_.empty()) check_order(entries_.back().name, entry.name, name_at, "array name " + name);
      std::uint64_t extent = item_size(entry.dtype);
      bool empty = false;
      for (std::uint64_t k = 0; k < rank; ++k) {
        const std::uint64_t dimension = field(entry_size + 8 * k, 8);
        entry.shape.push_back(dimension);
        if (dimension == 0)
          empty = true;
        else if (extent > (extent_limit - 1) / dimension)
          fail(name + " has a shape which is beyond 2^63 bytes", shape_at);
        else
          extent *= dimension;
      }
      if (entry.bytes != (empty ? 0 : extent))
        fail(name + " has " + std::to_string(entry.bytes) + " bytes, not those of its type and shape",
             position + 8);
      const std::string at = name + " at " + std::to_string(entry.offset);
      if (entry.offset % alignment != 0) fail(at + " is not at a multiple of 64", position);
      if (entry.offset > size_ || entry.bytes > size_ - entry.offset)
        fail(at + " ends past the file's " + std::to_string(size_) + " bytes", position);
      if (entry.offset < place) fail(at + " overlaps what ends at " + std::to_string(place), position);
      if (entry.offset > place) fail(at + " leaves a gap after " + std::to_string(place), position);
      position = name_at + n_name;
      place = aligned(entry.offset + entry.bytes);
      entries_.push_back(std::move(entry));
    }
    if (position != end)
      fail(std::to_string(end - position) + " bytes follow the last array in the index", position);
    if (place > size_)
      fail("truncated: the padding after the last array ends at " + std::to_string(place), size_);
    if (place < size_) fail(std::to_string(size_ - place) + " bytes belong to no array", place);
  }

  void parse_metadata(const detail::Bytes& contents, std::uint64_t count, std::uint64_t position,
                      std::uint64_t end) {
    using namespace detail;
    std::string last;
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::string which = "pair " + std::to_string(i);
      check_room(position, pair_size, end, which + "'s record ends past the metadata");
      const std::uint64_t n_key = load(contents.data() + position, 4);
      const std::uint64_t n_value = load(contents.data() + position + 4, 4);
      const std::uint64_t key_at = position + pair_size, value_at = key_at + n_key;
      check_room(key_at, n_key + n_value, end, which + "'s value ends past the metadata");
      const std::string key = utf8(contents, key_at, n_key, which + "'s key");
      if (i > 0) check_order(last, key, key_at, "metadata key " + in_quotes(key));
      metadata_.emplace(key, utf8(contents, value_at, n_value, "the value of " + in_quotes(key)));
      last = key;
      position = value_at + n_value;
    }
    if (position != end)
      fail(std::to_string(end - position) + " bytes follow the last pair in the metadata", position);
  }

  void check_room(std::uint64_t position, std::uint64_t bytes, std::uint64_t end,
                  const std::string& message) const {
    if (bytes > end - position) fail(message, position);
  }

  // std::string compares bytes as unsigned, like the format
  void check_order(const std::string& last, const std::string& next, std::uint64_t offset,
                   const std::string& what) const {
    if (next <= last) fail(what + (next == last ? " appears twice" : " is out of order"), offset);
  }

  std::string utf8(const detail::Bytes& contents, std::uint64_t offset, std::uint64_t bytes,
                   const std::string& what) const {
    const auto start = contents.begin() + static_cast<std::ptrdiff_t>(offset);
    std::string text(start, start + static_cast<std::ptrdiff_t>(bytes));
    if (!detail::is_utf8(text)) fail(what + " is not UTF-8", offset);
    return text;
  }

  std::filesystem::path path_;
  std::ifstream stream_;
  std::uint64_t size_ = 0;
  std::vector<Entry> entries_;
  Metadata metadata_;
};

// What to write: elements in C order, which must outlive it.
struct Array {
  DType dtype;
  Shape shape;
  const unsigned char* data;
  std::uint64_t bytes;
};

// `data` seen as an array of `shape`; without one, of rank 1.
template <class T>
Array array(const std::vector<T>& data, Shape shape) {
  static_assert(std::is_trivially_copyable_v<T>);
  return {detail::Code<T>::value, std::move(shape), reinterpret_cast<const unsigned char*>(data.data()),
          data.size() * sizeof(T)};
}
template <class T>
Array array(const std::vector<T>& data) {
  return array(data, {data.size()});
}
template <class T>
Array array(std::vector<T>&&, Shape = {}) = delete;  // it would not outlive the Array

namespace detail {

// A file that takes the place of `path` when it is kept, and is removed otherwise.
class Temporary {
 public:
  explicit Temporary(const std::filesystem::path& path) : target_(path) {
    std::error_code code;
    if (std::filesystem::exists(path, code))
      target_ = std::filesystem::canonical(path);  // through a symbolic link
    std::random_device random;
    temporary_ = target_;
    temporary_.replace_filename("." + hex(random()) + hex(random()) + ".tmp");
    file_ = std::fopen(temporary_.string().c_str(), "wbx");
    if (!file_) throw std::system_error(errno, std::generic_category(), path.string());
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;
  ~Temporary() {
    if (file_) std::fclose(file_);
    std::error_code code;
    if (!kept_) std::filesystem::remove(temporary_, code);
  }

  void write(const unsigned char* data, std::size_t bytes) {
    check(bytes == 0 || std::fwrite(data, 1, bytes, file_) == bytes);
  }
  void rewind() { check(std::fseek(file_, 0, SEEK_SET) == 0); }
  void keep() {
    check(std::fflush(file_) == 0);
#if defined(__unix__) || defined(__APPLE__)
    check(fsync(fileno(file_)) == 0);
#endif
    check(std::fclose(std::exchange(file_, nullptr)) == 0);
    std::filesystem::rename(temporary_, target_);
    kept_ = true;
  }

 private:
  void check(bool done) const {
    if (!done) throw std::system_error(errno, std::generic_category(), target_.string());
  }

  std::filesystem::path target_, temporary_;
  std::FILE* file_ = nullptr;
  bool kept_ = false;
};

inline void check_array(const std::string& name, const Array& array) {
  const std::string what = "array " + in_quotes(name);
  if (name.empty() || name.size() > 0xffff || !is_utf8(name))
    throw std::invalid_argument(what + " must have a name of 1 to 65535 bytes of UTF-8");
  if (array.shape.size() > max_rank) throw std::invalid_argument(what + " has a rank above 64");
  std::uint64_t extent = item_size(array.dtype);
  bool empty = false;
  for (const std::uint64_t dimension : array.shape) {
    empty = empty || dimension == 0;
    if (dimension != 0 && extent > (extent_limit - 1) / dimension)
      throw std::invalid_argument(what + " has a shape which is beyond 2^63 bytes");
    if (dimension != 0) extent *= dimension;
  }
  if (array.bytes != (empty ? 0 : extent))
    throw std::invalid_argument(what + " has " + std::to_string(array.bytes) +
                                " bytes, not those of its type and shape");
  const auto is_bad = [](unsigned char byte) { return byte > 1; };
  if (array.dtype == DType::boolean && std::any_of(array.data, array.data + array.bytes, is_bad))
    throw std::invalid_argument(what + " is bool and must hold only 0 and 1");
}

inline void check_text(const std::string& text, const std::string& what) {
  if (text.size() > 0xffffffff || !is_utf8(text))
    throw std::invalid_argument(what + " must be UTF-8 of fewer than 2^32 bytes");
}

// In the file's byte order, followed by its padding; returns the CRC-32.
inline std::uint32_t write_array(Temporary& file, const Array& array) {
  const auto bytes = static_cast<std::size_t>(array.bytes);
  std::uint32_t crc = 0;
  Bytes block;
  for (std::size_t start = 0; start < bytes; start += chunk) {
    block.assign(array.data + start, array.data + start + std::min(chunk, bytes - start));
    to_native(block.data(), block.size(), item_size(array.dtype));
    crc = crc32(block.data(), block.size(), crc);
    file.write(block.data(), block.size());
  }
  const Bytes padding(static_cast<std::size_t>(aligned(array.bytes) - array.bytes));
  file.write(padding.data(), padding.size());
  return crc;
}

}  // namespace detail

// Write a file, which is there entirely or not at all.
inline void write(const std::filesystem::path& path, const std::map<std::string, Array>& arrays,
                  const Metadata& metadata = {}) {
  using namespace detail;
  std::uint64_t n_index = 0;
  for (const auto& [name, array] : arrays) {
    check_array(name, array);
    n_index += entry_size + 8 * array.shape.size() + name.size();
  }
  Bytes pairs;
  for (const auto& [key, value] : metadata) {
    check_text(key, "metadata key " + in_quotes(key));
    check_text(value, "the value of metadata key " + in_quotes(key));
    store(pairs, key.size(), 4);
    store(pairs, value.size(), 4);
    pairs.insert(pairs.end(), key.begin(), key.end());
    pairs.insert(pairs.end(), value.begin(), value.end());
  }

  Temporary file(path);
  std::uint64_t position = aligned(header_size + n_index + pairs.size());
  const Bytes room(static_cast<std::size_t>(position));  // the index holds the CRCs, so it is written last
  file.write(room.data(), room.size());
  Bytes contents;
  for (const auto& [name, array] : arrays) {
    store(contents, position, 8);
    store(contents, array.bytes, 8);
    store(contents, write_array(file, array), 4);
    store(contents, name.size(), 2);
    store(contents, static_cast<std::uint64_t>(array.dtype), 1);
    store(contents, array.shape.size(), 1);
    for (const std::uint64_t dimension : array.shape) store(contents, dimension, 8);
    contents.insert(contents.end(), name.begin(), name.end());
    position += aligned(array.bytes);
  }
  contents.insert(contents.end(), pairs.begin(), pairs.end());

  Bytes header(magic.begin(), magic.end());
  store(header, version, 4);
  store(header, arrays.size(), 4);
  store(header, position, 8);
  store(header, n_index, 8);
  store(header, pairs.size(), 8);
  store(header, metadata.size(), 4);
  store(header, crc32(contents.data(), contents.size()), 4);
  header.resize(60);
  store(header, crc32(header.data(), 60), 4);
  file.rewind();
  file.write(header.data(), header.size());
  file.write(contents.data(), contents.size());
  file.keep();
}

}  // namespace kdtr
