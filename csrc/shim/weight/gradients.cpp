#include "shim/weight/gradients.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include "shim/group/dtensor.h"
#include "shim/group/facts.h"
#include "shim/group/saved.h"
#include "shim/weight/zbp_weight.h"
#include "shim/torch/nodes.h"
#include "shim/group/work.h"

namespace zbp {

namespace gen = torch::autograd::generated;
using torch::autograd::AccumulateGrad;

namespace {

// ---- products

/// By the last two dimensions.
bool is_column_major(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  const size_t d = strides.size();
  return d >= 2 && strides[d - 2] == 1 && strides[d - 1] == sizes[d - 2];
}

/// True if a product's node computes its weight's gradient transposed. It does so for a
/// column-major weight, to lay the gradient out as the weight. The other way round BLAS may round
/// otherwise.
bool is_multiplied_transposed(Node& node, bool weight_is_left) {
  if (auto* n = as<gen::AddmmBackward0>(node)) {
    return weight_is_left ? is_column_major(n->mat1_sym_sizes, n->mat1_sym_strides)
                          : is_column_major(n->mat2_sym_sizes, n->mat2_sym_strides);
  }
  const auto of = [weight_is_left](const auto& n) {
    return weight_is_left ? is_column_major(n.self_sym_sizes, n.self_sym_strides)
                          : is_column_major(n.mat2_sym_sizes, n.mat2_sym_strides);
  };
  if (auto* n = as<gen::MmBackward0>(node)) {
    return of(*n);
  }
  auto* n = as<gen::GroupedMmBackward0>(node);
  return n && of(*n);  // products of batches are not
}

at::Tensor product_of(const at::Tensor& left, const at::Tensor& right) {
  return left.dim() == 2 ? left.mm(right) : left.bmm(right);
}

at::Tensor tensor_in(const Saved& saved) {
  const auto* packed = std::get_if<PackedPtr>(&saved);
  return packed ? (*packed)->unpack() : std::get<Kept>(saved).tensor();
}

at::Tensor oriented(const Operand& operand) {
  return operand.is_transposed ? operand.matrix.transpose(-2, -1) : operand.matrix;
}

/// The same for a gradient on its way to a weight: see along_path().
at::Tensor turned(const Operand& operand) {
  const at::AutoDispatchBelowADInplaceOrView no_view;
  return oriented(operand);
}

/// The two matrices whose product is the gradient at a face, as the node's own backward multiplies
/// them. For Y = A B: dA = dY Bᵀ, dB = Aᵀ dY, or both sides of that transposed. `is_transposed`:
/// the gradient is the product transposed: the one at the weight, unless the path is viewed.
struct Factors {
  Operand left, right;
  bool is_transposed;
};

Factors factors_of(const Task& task, const Product& product, bool is_transposed) {
  const Operand grad{product.output_grad.tensor(), false};
  const Operand other{tensor_in(product.other), true};
  const auto [left, right] =
      product.weight_is_left ? std::pair(grad, other) : std::pair(other, grad);
  if (!is_multiplied_transposed(*task.node, product.weight_is_left)) {
    return {left, right, is_transposed};
  }
  return {{right.matrix, !right.is_transposed}, {left.matrix, !left.is_transposed}, !is_transposed};
}

at::Tensor multiplied(const Task& task, const Product& product, const Factors& factors) {
  const at::Tensor left = turned(factors.left);
  const at::Tensor right = turned(factors.right);
  if (as<gen::GroupedMmBackward0>(*task.node)) {
    const at::AutoDispatchBelowADInplaceOrView no_view;  // of each group's rows
    const at::Tensor offsets = tensor_in(product.offsets);
    return at::_grouped_mm(left, right, offsets.defined() ? std::optional(offsets) : std::nullopt);
  }
  return product_of(left, right);
}

/// The gradients of a convolution's weight and bias, by its edges: the bias's alone would round
/// otherwise.
variable_list convolved(const Task& task, const Product& product) {
  auto& n = static_cast<gen::ConvolutionBackward0&>(*task.node);
  auto [input, weight, bias] = at::convolution_backward_symint(
      product.output_grad.tensor(), tensor_in(product.other), filled(*product.weight),
      n.bias_sym_sizes_opt, n.stride, n.padding, n.dilation, n.transposed, n.output_padding,
      n.groups, {false, true, task.face_at(2) >= 0});
  return {std::move(input), std::move(weight), std::move(bias)};
}

/// The product whose gradient the face gives, if it is one.
const Product* product_at(const Task& task, size_t f) {
  const auto* product = std::get_if<Product>(&task.work);
  return product && task.plan(f).slot == product->matrix_slot &&
                 product->output_grad.tensor().defined()
             ? product
             : nullptr;
}

/// A product on its way into a sum.
struct Addition {
  at::Tensor sum, left, right;
};

bool is_wider(c10::ScalarType sum, c10::ScalarType product) {
  return sum != product && c10::promoteTypes(sum, product) == sum;
}

/// Whether the device multiplies 16-bit matrices into a float32 sum, as CUDA does.
bool has_wide_kernel(const Addition& a) {
  const c10::DispatchKey backend = c10::toRuntimePerBackendFunctionalityKey(
      c10::DispatchKey::Dense, a.sum.key_set().highestBackendKey());
  const char* const name = a.sum.dim() == 2 ? "aten::addmm" : "aten::baddbmm";
  const auto kernel = c10::Dispatcher::singleton().findSchema({name, "dtype_out"});
  return !a.sum.is_cpu() && kernel && kernel->hasKernelForDispatchKey(backend) &&
         a.sum.scalar_type() == at::kFloat && a.left.scalar_type() == a.right.scalar_type() &&
         a.sum.layout() == c10::kStrided && a.left.layout() == c10::kStrided &&
         a.right.layout() == c10::kStrided && a.sum.numel() > 0;
}

void add_in_one(const Addition& a) {
  at::Tensor sum = a.sum;
  sum.dim() == 2 ? sum.addmm_(a.left, a.right) : sum.baddbmm_(a.left, a.right);
}

void add_wide(const Addition& a) {
  at::Tensor sum = a.sum;
  if (has_wide_kernel(a)) {
    sum.dim() == 2 ? at::addmm_outf(sum, a.left, a.right, at::kFloat, 1, 1, sum)
                   : at::baddbmm_outf(sum, a.left, a.right, at::kFloat, 1, 1, sum);
  } else {
    add_in_one({sum, a.left.to(sum.scalar_type()), a.right.to(sum.scalar_type())});
  }
}

/// On the CPU `sum += left @ right`, to the bit: BLAS's own accumulation (beta = 1) rounds once per
/// block of the inner dimension where this rounds twice in all, and differs from an ordinary
/// backward.
void add(const Addition& a, c10::ScalarType type, zbp_how how) {
  if (a.sum.scalar_type() == a.left.scalar_type() && (how.fuse || !a.sum.is_cpu())) {
    add_in_one(a);
  } else if (how.fuse && is_wider(a.sum.scalar_type(), a.left.scalar_type())) {
    add_wide(a);
  } else {
    a.sum.add_(product_of(a.left, a.right).to(type));
  }
}

/// Adds the product of face number `f` in place to `grad`, which is laid out as the weight is. A
/// product that is not fused is rounded to `type`, the weight's, before it is added. False, and
/// nothing was done, if it cannot be added so.
bool add_in_place(const at::Tensor& grad, c10::ScalarType type, const Task& task,
                  const Product& product, size_t f, zbp_how how) {
  if (task.plan(f).is_viewed) {
    return false;
  }
  Factors factors = factors_of(task, product, task.plan(f).is_transposed);
  Operand sum{grad, factors.is_transposed};
  if (is_subclass(grad) && !make_local(sum, factors.left, factors.right)) {
    return false;
  }
  const Addition a{oriented(sum), turned(factors.left), turned(factors.right)};
  if (at::has_internal_overlap(a.sum) != at::MemOverlap::No || a.sum.dim() != a.left.dim() ||
      a.sum.size(-2) != a.left.size(-2) || a.sum.size(-1) != a.right.size(-1) ||
      a.sum.device() != a.left.device() || a.sum.is_alias_of(a.left) ||
      a.sum.is_alias_of(a.right)) {
    return false;
  }
  add(a, type, how);
  return true;
}

// ---- what is all that its weight is owed

/// Where the weight's gradients are added; undefined if there is nothing yet.
const at::Tensor& sum_of(const Weight& weight) {
  return weight.main_grad.defined() ? weight.main_grad : weight.accumulator->variable.grad();
}

/// Whether a product can be added in place to the gradient that the weight has.
bool takes_product(const Weight& weight, zbp_how how) {
  const at::Tensor& grad = sum_of(weight);
  const at::Tensor& variable = weight.accumulator->variable;
  return grad.defined() && !grad.requires_grad() && !grad.is_complex() &&
         is_subclass(grad) == is_subclass(variable) && grad.sizes().equals(variable.sizes()) &&
         (weight.main_grad.defined() || grad.scalar_type() == variable.scalar_type() ||
          (how.fuse && is_wider(grad.scalar_type(), variable.scalar_type())));
}

/// False, and nothing was done, if the face's gradient is no product or cannot be added so. The
/// accumulator's mutex is taken before the GIL, which a DTensor may ask for: as in libtorch's own
/// accumulation.
bool add_product(const Weight& weight, const Task& task, size_t f, zbp_how how) {
  const Product* const product = product_at(task, f);
  if (!product || product->weight || as<gen::GroupedMmBackward0>(*task.node)) {
    return false;
  }
  const std::lock_guard<std::mutex> lock(NodeParts::mutex_of(*weight.accumulator));
  return takes_product(weight, how) &&
         add_in_place(sum_of(weight), weight.accumulator->variable.scalar_type(), task, *product, f,
                      how);
}

void add_alone(Group& group, uint32_t number, zbp_how how) {
  RECORD_USER_SCOPE("zbpipe::group");
  Task& task = group.tasks[group.layout.face[number].task];
  Weight& weight = group.weights[group.layout.face[number].weight];
  const size_t f = number - task.plan().face_begin;
  const c10::OptionalStreamGuard stream(stream_of(weight));
  if (add_product(weight, task, f, how)) {
    return;
  }
  variable_list none;
  variable_list grad{face_grad(task, f, none)};
  const auto check = [&grad](const Edge& edge) {
    torch::autograd::validate_outputs({edge}, grad, [](const std::string& message) {
      return "a weight task returned an " + message;
    });
  };
  if (zbp_layout_has_path(&task.plan(f))) {
    check(task.face[f].edge);
    grad[0] = grad[0].defined() ? along_path(task, f, std::move(grad[0])) : at::Tensor();
  }
  check(Edge(weight.accumulator, 0));
  Kept* const kept = how.retain ? nullptr : only_kept_grad(task, f);
  accumulate(weight, std::exchange(grad[0], {}), kept);
  if (kept) {
    kept->reset();  // it is added: a retry does not ask for it
  }
}

}  // namespace

at::Tensor face_grad(Task& task, size_t f, variable_list& outputs) {
  if (auto* of = std::get_if<Product>(&task.work); of && of->weight) {
    const uint32_t slot = task.plan(f).slot;
    if (of->output_grad.tensor().defined() && (of->made.empty() || !of->made[slot].defined())) {
      of->made = convolved(task, *of);
    }
    return of->made.empty() ? at::Tensor() : std::exchange(of->made[slot], {});
  }
  if (const Product* product = product_at(task, f)) {
    const Factors factors = factors_of(task, *product, false);
    return turned({multiplied(task, *product, factors), factors.is_transposed});
  }
  if (const auto* of_sum = std::get_if<Product>(&task.work)) {
    // The added matrix or bias; the engine's rules reduce it.
    return of_sum->output_grad.tensor();
  }
  return std::holds_alternative<Deferred>(task.work) ? std::move(outputs[task.plan(f).slot])
                                                     : given_grad(task, f);
}

void accumulate(Weight& weight, const at::Tensor& grad, Kept* kept) {
  AccumulateGrad& accumulator = *weight.accumulator;
  if (!grad.defined() || !accumulator.variable.requires_grad()) {
    return;
  }
  const std::lock_guard<std::mutex> lock(NodeParts::mutex_of(accumulator));
  if (weight.main_grad.defined()) {
    weight.main_grad.add_(grad);
    return;
  }
  at::Tensor& sum = accumulator.variable.mutable_grad();
  const bool can_be_taken = kept && kept->tensor().is_same(grad) && !sum.defined() &&
                            grad.has_storage() && grad.storage().use_count() == 1;
  // Memory that somebody else has too (a view of what a task keeps, of the caller's own gradient)
  // must not be taken for the weight's own: with no reference expected it is copied.
  const bool is_shared = grad.has_storage() && grad.storage().use_count() > 1;
  const int holders = 1 + (accumulator.post_hooks().empty() ? 0 : 1) + (can_be_taken ? 1 : 0);
  const int references = is_shared ? 0 : holders;
  AccumulateGrad::accumulateGrad(accumulator.variable, sum, grad, references,
                                 [&sum](at::Tensor&& updated) { sum = std::move(updated); });
  if (can_be_taken) {
    kept->reset();
  }
}

}  // namespace zbp

int zbp_add_alone(zbp_group* group, uint32_t face, zbp_how how, zbp_error* error) {
  return zbp::kept_in(error, [&] { zbp::add_alone(zbp::group_of(group), face, how); });
}
