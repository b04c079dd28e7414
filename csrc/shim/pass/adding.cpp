// A group's gradients on their way to its weights without the engine: the part of zbp_touch.h that adds directly.

#include <optional>

#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/engine.h>

#include "shim/pass/dtensor.h"
#include "shim/pass/saved.h"
#include "shim/torch/nodes.h"
#include "shim/pass/product.h"
#include "shim/pass/weight_nodes.h"
#include "shim/pass/zbp_touch.h"
#include "shim/torch/error.h"
#include "shim/torch/ranges.h"
#include "shim/work/work.h"

using namespace zbp;
using torch::autograd::AccumulateGrad;

struct zbp_adding {
  zbp_adding(Group& of_group, zbp_how as_how)
      : group(of_group), how(as_how), range(of_group), sums(of_group.weights.size()) {}

  Task& task_of(uint32_t face) const { return group.tasks[group.layout.face[face].task]; }
  size_t number_of(uint32_t face) const { return face - task_of(face).plan().face_begin; }
  Weight& weight_of(uint32_t face) const { return group.weights[group.layout.face[face].weight]; }

  Group& group;
  const zbp_how how;
  const ProfiledRange range;
  std::optional<c10::OptionalStreamGuard> stream;  // the task's
  variable_list outputs;  // of its node, a deferred one, which gives all its gradients at once
  std::vector<at::Tensor> sums;  // per weight
};

namespace {

/// The gradient that the face gives to its weight, as the accumulator expects it.
at::Tensor checked_grad(zbp_adding& adding, uint32_t face) {
  const Weight& weight = adding.weight_of(face);
  variable_list grad{face_grad(adding.task_of(face), adding.number_of(face), adding.outputs)};
  torch::autograd::validate_outputs(
      {Edge(weight.accumulator, 0)}, grad,
      [](const std::string& message) { return "a weight task returned an " + message; });
  return std::move(grad[0]);
}

bool takes_products(const Weight& weight, zbp_how how) {
  const at::Tensor& grad = sum_of(weight);
  const at::Tensor& variable = weight.accumulator->variable;
  return grad.defined() && !grad.requires_grad() && !grad.is_complex() &&
         is_subclass(grad) == is_subclass(variable) && grad.sizes().equals(variable.sizes()) &&
         (weight.main_grad.defined() || grad.scalar_type() == variable.scalar_type() ||
          (how.wide && grad.scalar_type() == at::kFloat));
}

Weight& weight_of(const zbp_product& product) {
  Group& group = group_of(product.turn->held);
  return group.weights[group.layout.face[product.face].weight];
}

/// The product's task, and which of its faces it is.
std::pair<Task&, size_t> place_of(const zbp_product& product) {
  Group& group = group_of(product.turn->held);
  Task& task = group.tasks[group.layout.face[product.face].task];
  return {task, product.face - task.plan().face_begin};
}

zbp_half& half_of(const zbp_product& product) {
  return product.turn->book->face[product.face].half;
}

/// Those of the products that can be added together, from the first on.
Additions additions_of(c10::ArrayRef<zbp_product> products, const at::Tensor& grad, zbp_how how) {
  Additions additions;
  for (const zbp_product& product : products) {
    const auto [task, i] = place_of(product);
    const Weight& weight = weight_of(product);
    if (!is_product(task, task.plan(i)) || !sum_of(weight).is_same(grad)) {
      break;
    }
    auto addition = addition_to(grad, weight.accumulator->variable.scalar_type(), task, i,
                                half_of(product).panels);
    if (!addition || !(additions.empty() || go_together(additions[0], *addition, how))) {
      break;
    }
    additions.push_back(std::move(*addition));
  }
  return additions;
}

/// Tells the books how far the products have come.
uint32_t note_added(c10::ArrayRef<zbp_product> products, const Additions& additions,
                    const at::Tensor& grad) {
  uint32_t done = 0;
  for (size_t p = 0; p < additions.size(); ++p) {
    zbp_half& half = half_of(products[p]);
    if (additions[p].is_done) {
      half = {};
      ++done;
    } else if (additions[p].panels_added > half.panels) {
      const auto [task, i] = place_of(products[p]);
      task.face[i].panels_in = local_part(grad).storage().getWeakStorageImpl();
      half = {additions[p].panels_added, identity_of(grad)};
    }
  }
  return done;
}

void add_products(c10::ArrayRef<zbp_product> products, zbp_how how, uint32_t& added) {
  const Weight& weight = weight_of(products[0]);
  const std::lock_guard<std::mutex> lock(NodeParts::mutex_of(*weight.accumulator));
  const at::Tensor grad = sum_of(weight);
  if (!takes_products(weight, how)) {
    return;
  }
  Additions additions = additions_of(products, grad, how);
  if (additions.empty()) {
    return;
  }
  try {
    add_all(additions, how);
  } catch (...) {
    added = note_added(products, additions, grad);
    throw;
  }
  added = note_added(products, additions, grad);
}

void add_to_sum(zbp_adding& adding, uint32_t face) {
  Task& task = adding.task_of(face);
  const size_t i = adding.number_of(face);
  const Weight& weight = adding.weight_of(face);
  at::Tensor& sum = adding.sums[adding.group.layout.face[face].weight];
  if (sum.defined() && sum.is_cpu() && is_product(task, task.plan(i))) {
    if (auto addition = addition_to(sum, weight.accumulator->variable.scalar_type(), task, i, 0)) {
      Additions one{std::move(*addition)};
      add_all(one, {});
      return;
    }
  }
  at::Tensor grad = checked_grad(adding, face);
  if (!sum.defined()) {
    sum = std::move(grad);
  } else if (grad.defined()) {
    // What is not a product may be the output gradient itself.
    const bool is_own = sum.use_count() == 1 && sum.storage().use_count() == 1;
    sum = is_own ? sum.add_(grad) : sum + grad;
  }
}

}  // namespace

int zbp_adding_new(zbp_held* held, zbp_how how, zbp_adding** adding_out, zbp_error* error) {
  return kept_in(error, [&] { *adding_out = new zbp_adding(group_of(held), how); });
}

void zbp_adding_free(zbp_adding* adding) {
  delete adding;
}

int zbp_adding_begin(zbp_adding* adding, uint32_t task, zbp_error* error) {
  return kept_in(error, [&] {
    const Task& t = adding->group.tasks[task];
    adding->stream.reset();
    adding->stream.emplace(t.place ? std::optional<c10::Stream>(t.place->stream()) : std::nullopt);
    adding->outputs.clear();
    if (t.kind() == Kind::deferred) {
      adding->outputs = run_deferred(t);
    }
  });
}

int zbp_add_products(const zbp_product* product, uint32_t count, zbp_how how, uint32_t* added_out,
                     zbp_error* error) {
  *added_out = 0;
  return kept_in(error, [&] { add_products({product, count}, how, *added_out); });
}

int zbp_add_gradient(zbp_adding* adding, uint32_t face, zbp_error* error) {
  return kept_in(error, [&] {
    Task& task = adding->task_of(face);
    const size_t i = adding->number_of(face);
    run_works_for(task, i, adding->how.retain);
    const at::Tensor grad = checked_grad(*adding, face);
    accumulate(adding->weight_of(face), grad,
               adding->how.retain ? nullptr : only_kept_grad(task, i));
  });
}

void zbp_let_go(zbp_adding* adding, uint32_t face) {
  if (Watched* kept = only_kept_grad(adding->task_of(face), adding->number_of(face))) {
    kept->reset();
  }
}

int zbp_sum_gradient(zbp_adding* adding, uint32_t face, zbp_error* error) {
  return kept_in(error, [&] { add_to_sum(*adding, face); });
}

int zbp_add_sum(zbp_adding* adding, uint32_t weight, zbp_error* error) {
  return kept_in(error, [&] {
    accumulate(adding->group.weights[weight], adding->sums[weight], nullptr);
    adding->sums[weight].reset();
  });
}
