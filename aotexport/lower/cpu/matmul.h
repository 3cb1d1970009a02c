// Float32 matmuls in a library, by torch's backend (MKL) or by oneDNN, as the loader decides.
//
// The first call of a library records its matmuls. The loader then chooses a backend for each, closes the table, and
// calls again. Torch's headers come before this file; after it, the names of torch's matmul functions mean these.

#include <torch/csrc/inductor/aoti_torch/c/shim_cpu.h>

#include <algorithm>
#include <cstdint>
#include <mutex>

#pragma weak aoti_torch_cpu__linear_pointwise

// Every library of a process has a table of its own.
namespace {
namespace aotexport {

// One matmul, as `aotexport_runtime.engines.matmul.library` reads it: whether a bias is added; rows, depth and
// columns; strides of the first and of the second operand; and whether oneDNN computes it.
struct Matmul {
  int64_t is[8];
  int64_t by_onednn;
};

constexpr int64_t capacity = 128;

// `mode` is the loader's: the matmul backend of its first load; 0: it was not loaded yet.
struct MatmulTable {
  int64_t mode;
  int64_t count;
  int64_t is_closed;
  Matmul matmuls[capacity];
};

MatmulTable known{};

constexpr int64_t least_size = 16;
constexpr int64_t least_work = 1 << 21;

struct Matrix {
  int64_t sizes[2];
  int64_t strides[2];
  int64_t offset;
};

inline bool described(AtenTensorHandle tensor, Matrix& matrix) {
  int64_t rank = 0;
  int32_t dtype = 0;
  int64_t *sizes = nullptr, *strides = nullptr;
  if (aoti_torch_get_dim(tensor, &rank) || rank != 2 || aoti_torch_get_dtype(tensor, &dtype) ||
      dtype != aoti_torch_dtype_float32() || aoti_torch_get_sizes(tensor, &sizes) ||
      aoti_torch_get_strides(tensor, &strides) || aoti_torch_get_storage_offset(tensor, &matrix.offset)) {
    return false;
  }
  for (int axis = 0; axis < 2; ++axis) {
    matrix.sizes[axis] = sizes[axis];
    matrix.strides[axis] = strides[axis];
  }
  return true;
}

// Whether a tensor is a dense row of `columns` numbers, or such a row expanded; sets the offset where it begins.
inline bool is_bias(AtenTensorHandle tensor, int64_t columns, int64_t& offset) {
  int64_t rank = 0;
  int64_t *sizes = nullptr, *strides = nullptr;
  if (aoti_torch_get_dim(tensor, &rank) || aoti_torch_get_sizes(tensor, &sizes) ||
      aoti_torch_get_strides(tensor, &strides) || aoti_torch_get_storage_offset(tensor, &offset)) {
    return false;
  }
  return (rank == 1 || (rank == 2 && strides[0] == 0)) && sizes[rank - 1] == columns && strides[rank - 1] == 1;
}

inline bool is_contiguous(const Matrix& matrix) {
  return matrix.strides[1] == 1 && matrix.strides[0] == matrix.sizes[1];
}

inline bool is_turned(const Matrix& matrix) {
  return matrix.strides[0] == 1 && matrix.strides[1] == matrix.sizes[0];
}

// Whether oneDNN computes this matmul. While the table is open, a new matmul is recorded.
inline bool by_onednn(const int64_t (&is)[8]) {
  static std::mutex mutex;
  std::unique_lock<std::mutex> lock(mutex, std::defer_lock);
  if (!known.is_closed) {
    lock.lock();
  }
  for (int64_t index = 0; index < known.count; ++index) {
    if (std::equal(is, is + 8, known.matmuls[index].is)) {
      return known.matmuls[index].by_onednn;
    }
  }
  if (!known.is_closed && known.count < capacity) {
    std::copy(is, is + 8, known.matmuls[known.count].is);
    ++known.count;
  }
  return false;
}

// Owns a tensor for a block.
struct Owned {
  AtenTensorHandle handle = nullptr;
  ~Owned() {
    if (handle) {
      aoti_torch_delete_tensor_object(handle);
    }
  }
};

// Computes the matmul by oneDNN and returns true, or does nothing and returns false.
inline bool computed(AtenTensorHandle out, AtenTensorHandle added, AtenTensorHandle rows, AtenTensorHandle matrix) {
  Matrix o, a, b;
  if (!aoti_torch_cpu__linear_pointwise || !described(rows, a) || !described(matrix, b)) {
    return false;
  }
  const int64_t m = a.sizes[0], k = a.sizes[1], n = b.sizes[1];
  if (m < least_size || k < least_size || n < least_size || m * k * n < least_work) {
    return false;
  }
  if (!described(out, o) || !is_contiguous(o) || !(is_contiguous(a) || is_turned(a)) ||
      !(is_contiguous(b) || is_turned(b))) {
    return false;
  }
  int64_t bias_offset = 0;
  if (added && !is_bias(added, n, bias_offset)) {
    return false;
  }
  if (!by_onednn({added != nullptr, m, k, n, a.strides[0], a.strides[1], b.strides[0], b.strides[1]})) {
    return false;
  }
  Owned weight, bias, result;
  const int64_t sizes[] = {n, k}, strides[] = {b.strides[1], b.strides[0]}, one = 1;
  if (aoti_torch__reinterpret_tensor(matrix, 2, sizes, strides, b.offset, &weight.handle) ||
      (added && aoti_torch__reinterpret_tensor(added, 1, &n, &one, bias_offset, &bias.handle)) ||
      aoti_torch_cpu__linear_pointwise(
          rows, weight.handle, added ? &bias.handle : nullptr, "none", nullptr, 0, nullptr, &result.handle)) {
    return false;
  }
  return !aoti_torch_copy_(out, result.handle, 0);
}

inline AOTITorchError mm_out(AtenTensorHandle out, AtenTensorHandle rows, AtenTensorHandle matrix) {
  return computed(out, nullptr, rows, matrix) ? AOTI_TORCH_SUCCESS : aoti_torch_cpu_mm_out(out, rows, matrix);
}

inline AOTITorchError addmm_out(
    AtenTensorHandle out, AtenTensorHandle added, AtenTensorHandle rows, AtenTensorHandle matrix, double beta,
    double alpha) {
  const bool is_plain = beta == 1 && alpha == 1;
  return is_plain && computed(out, added, rows, matrix)
      ? AOTI_TORCH_SUCCESS
      : aoti_torch_cpu_addmm_out(out, added, rows, matrix, beta, alpha);
}

} // namespace aotexport
} // namespace

// Libraries in existing bundles have this name, by which the loader finds the table.
extern "C" __attribute__((visibility("default"))) void* aotexport_products() {
  return &aotexport::known;
}

#define aoti_torch_cpu_mm_out aotexport::mm_out
#define aoti_torch_cpu_addmm_out aotexport::addmm_out
