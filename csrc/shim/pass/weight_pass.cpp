// W: products and kept gradients straight into the weights where nobody watches, everything else in
// one engine run. See docs/architecture.md.

#include <algorithm>

#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "shim/torch/detach.h"
#include "shim/pass/dtensor.h"
#include "shim/torch/gil.h"
#include "shim/pass/kinds.h"
#include "shim/pass/path.h"
#include "shim/torch/ranges.h"
#include "shim/pass/start.h"
#include "shim/torch/streams.h"
#include "shim/pass/weight_nodes.h"
#include "shim/work/work.h"

namespace zbp {

using torch::autograd::AccumulateGrad;

namespace {

/// The two matrices whose product is the gradient at a task's face, as the node's own backward multiplies them.
struct Factors {
  at::Tensor left;
  at::Tensor right;

  at::Tensor multiply() const { return left.dim() == 2 ? left.mm(right) : left.bmm(right); }
};

/// For Y = A B: dA = dY Bᵀ, dB = Aᵀ dY, or both sides of that transposed.
std::pair<Factor, Factor> matrices_of(const Task& task) {
  const Factor grad{task.output_grads[0].tensor(), false};
  const Factor other{task.packed ? task.packed->unpack() : task.other.tensor(), true};
  const auto [left, right] = task.weight_is_left ? std::pair(grad, other) : std::pair(other, grad);
  if (!is_multiplied_transposed(task)) {
    return {left, right};
  }
  return {{right.matrix, !right.is_transposed}, {left.matrix, !left.is_transposed}};
}

/// Whether what lies at the weight, or at the face where there is more than transpositions in between, is
/// transposed against the product.
bool is_transposed(const Task& task, const Face& face) {
  return is_multiplied_transposed(task) != (face.simple && face.transposed);
}

at::Tensor oriented(const at::Tensor& matrix, bool is_transposed) {
  return is_transposed ? matrix.mT() : matrix;
}

/// The product, at the weight where nothing but transpositions and casts lies in between, else at the face.
at::Tensor multiply(const Task& task, const Face& face) {
  const auto [left, right] = matrices_of(task);
  const Factors factors{oriented(left.matrix, left.is_transposed),
                        oriented(right.matrix, right.is_transposed)};
  const at::Tensor product = factors.multiply();
  const at::AutoDispatchBelowADInplaceOrView no_view;  // see NodeParts::apply_without_views_to()
  return oriented(product, is_transposed(task, face));
}

/// The gradient for face number `i`, at its weight where it has a path; `outputs` are a deferred node's.
at::Tensor face_grad(const Task& task, size_t i, variable_list& outputs) {
  const Face& face = task.face[i];
  at::Tensor grad;
  switch (task.kind) {
    case Kind::product:
      if (!task.output_grads[0].tensor().defined()) {
        return {};
      }
      if (face.slot == task.matrix_slot) {
        grad = multiply(task, face);
        if (face.simple) {
          return grad;
        }
      } else {
        grad = task.output_grads[0]
                   .tensor();  // the added matrix or bias; the engine's rules reduce it
      }
      break;
    case Kind::deferred:
      grad = std::move(outputs[face.slot]);
      break;
    case Kind::whole:
      grad = kept_grad(task, i);
      break;
    case Kind::root:
      grad = task.output_grads[0].tensor();
      break;
  }
  return face.path.empty() ? grad : take_along(face, std::move(grad));
}

bool is_watched(AccumulateGrad& accumulator) {
  return has_hooks(accumulator) || accumulator.tensor_post_acc_grad_hooks() != nullptr;
}

/// Where the weight's gradients are added; undefined if there is nothing yet.
const at::Tensor& sum_of(const Weight& weight) {
  return weight.main_grad.defined() ? weight.main_grad : weight.accumulator->variable.grad();
}

/// True if the sum is still the one to which a W that raised has added some panels of the face's product.
bool has_panels(const at::Tensor& sum, const Face& face) {
  const auto storage = face.panels_in.lock();
  return storage && sum.defined() && storage_of(local_part(sum)) == storage.get();
}

/// A product of which a W that raised has added some panels can only be gone on with, in the same memory.
[[noreturn]] void refuse_half_added(const Weight& weight) {
  const at::Tensor& variable = weight.accumulator->variable;
  TORCH_CHECK(
      false, "a weight pass failed while it added to the gradient of the weight of ",
      variable.scalar_type(), " ", variable.sym_sizes(),
      ", and since then its gradient was replaced by another tensor or a hook was registered "
      "on its way; the rest of this microbatch's gradient can only be added, unwatched, to the "
      "tensor that has the first part: put that back, or repeat the step from zeroed gradients");
}

/// A hook that was put on a node of a path since I is owed its gradient.
void heed_new_hooks(Group& group) {
  for (Task& task : group.tasks) {
    for (Face& face : task.face) {
      const auto is_plain = [](Node* node) { return is_plain_step(*node); };
      if (!std::all_of(face.path.begin(), face.path.end(), is_plain)) {
        if (face.panels_added > 0) {
          refuse_half_added(group.weights[face.weight]);
        }
        give_up_path(face);
      }
    }
  }
}

/// Note [The order of sums]
/// An ordinary backward adds up gradients wherever they meet, in the order in which they come: first from where it
/// starts, then from the last node of the forward to the first; and what has met at a weight is added to its
/// gradient as one: (grad + a) + b would round otherwise than grad + (a + b). So tasks run in that order, a face's
/// path is not followed past a node where gradients meet, and where several faces end at a weight their sum is
/// formed first, unless the policy says `fused`.

/// What the faces that end at one weight give, if they are several.
struct Meeting {
  SmallVector<Face*, 2> faces;  // of which nothing has been added
  size_t came = 0;
  at::Tensor sum;
};

/// Per weight of the group.
std::vector<Meeting> meetings_in(Group& group) {
  std::vector<Meeting> meetings(group.weights.size());
  for (Task& task : group.tasks) {
    for (Face& face : task.face) {
      if (!face.delivered && face.panels_added == 0) {
        meetings[face.weight].faces.push_back(&face);
      }
    }
  }
  return meetings;
}

/// True for two tasks whose gradients can be summed without the engine, which knows how gradients of all kinds
/// and of several streams are summed.
bool sum_directly(const Task& a, const Task& b) {
  const bool on_one_stream =
      a.place && b.place ? a.place->stream() == b.place->stream() : !a.place && !b.place;
  return a.kind == Kind::product && b.kind == Kind::product && on_one_stream;
}

bool sums_directly(const Group& group) {
  std::vector<const Task*> before(group.weights.size());
  for (const Task& task : group.tasks) {
    for (const Face& face : task.face) {
      if (face.delivered) {
        continue;
      }
      const Task* other = std::exchange(before[face.weight], &task);
      const at::Tensor& variable = group.weights[face.weight].accumulator->variable;
      if (other && (is_subclass(variable) || !sum_directly(task, *other))) {
        return false;
      }
    }
  }
  return true;
}

/// True if the group's gradients can be added without the engine: every face ends at a weight and
/// nobody could tell the difference.
bool runs_directly(const Group& group, WeightPassOptions options) {
  for (const Task& task : group.tasks) {
    if (task.leaves_packed) {
      return false;  // within one run of the engine, a checkpointed region is recomputed only once
    }
    for (const Face& face : task.face) {
      if (face.weight < 0) {
        return false;
      }
    }
  }
  for (const Weight& weight : group.weights) {
    if (weight.arrived || is_watched(*weight.accumulator)) {
      return false;
    }
  }
  return (options.fuse || sums_directly(group)) && !torch::autograd::AnomalyMode::is_enabled();
}

/// So many rows or columns at the most that packing the other factor anew for each panel costs little,
/// cut where the kernels of BLAS (6, 8, 12, 16, 24, 48 wide) begin a new tile anyway.
constexpr int64_t tile = 48;
constexpr int64_t panel_size = 11 * tile;
/// With fewer of the other than this, BLAS has ways to cut a product that depend on all its sizes.
constexpr int64_t narrowest = 256;

/// Whether BLAS rounds each element of a part of a product, one of a batch or a panel, as in the whole.
/// Measured by benchmarks/panels.py: several threads, or kernels for 16 bits, cut a product by all its sizes.
bool rounds_parts_alike(const Factors& f) {
  const c10::ScalarType type = f.left.scalar_type();
  return (type == at::kFloat || type == at::kDouble) && at::get_num_threads() == 1;
}

/// Adds `left @ right`, rounded to `type`, to `sum`, a gradient on the CPU, as `sum += ...` does. Where the
/// bits are the same, no temporary is larger than `panel_size` rows or columns. BLAS's own accumulation
/// (beta = 1) rounds once per block of the inner dimension where this rounds twice in all, and differs from
/// an ordinary backward. Panels that a W that raised has `added` are passed over.
class PanelAdder {
 public:
  PanelAdder(c10::ScalarType type, int64_t& added) : type_(type), added_(added) {}

  void add(const at::Tensor& sum, const Factors& f) {
    if (!rounds_parts_alike(f) && added_ == 0) {
      add_panel(sum, f);
      return;
    }
    if (sum.dim() == 2) {
      add_matrix(sum, f);
      return;
    }
    const int64_t matrix_size = std::max<int64_t>(1, sum.size(1) * sum.size(2));
    const int64_t step = std::max<int64_t>(1, panel_size * panel_size / matrix_size);
    if (step >= sum.size(0) && sum.size(0) > 1) {
      add_panel(sum, f);
      return;
    }
    for (int64_t i = 0; i < sum.size(0); i += step) {
      const int64_t count = std::min(step, sum.size(0) - i);
      const at::Tensor matrices = sum.narrow(0, i, count);
      const Factors factors{f.left.narrow(0, i, count), f.right.narrow(0, i, count)};
      count == 1 ? add_matrix(matrices, factors) : add_panel(matrices, factors);
    }
  }

 private:
  /// Of a matrix, or of a batch of one.
  void add_matrix(const at::Tensor& sum, const Factors& f) {
    const bool by_rows = sum.size(-2) >= sum.size(-1);
    const int64_t dim = by_rows ? -2 : -1;
    const int64_t size = sum.size(dim);
    const int64_t panels = (size + panel_size - 1) / panel_size;
    if (panels <= 1 || std::min(sum.size(-2), sum.size(-1)) < narrowest) {
      add_panel(sum, f);
      return;
    }
    // Of the same size up to a tile: BLAS computes a few rows in another way than many.
    const int64_t tiles = size / tile;
    int64_t begin = 0;
    for (int64_t i = 0; i < panels; ++i) {
      const int64_t end =
          i + 1 < panels ? begin + (tiles / panels + (i < tiles % panels ? 1 : 0)) * tile : size;
      const int64_t count = end - begin;
      add_panel(sum.narrow(dim, begin, count),
                by_rows ? Factors{f.left.narrow(dim, begin, count), f.right}
                        : Factors{f.left, f.right.narrow(dim, begin, count)});
      begin = end;
    }
  }

  void add_panel(const at::Tensor& panel, const Factors& f) {
    if (seen_++ >= added_) {
      panel.add_(f.multiply().to(type_));
      ++added_;
    }
  }

  c10::ScalarType type_;
  int64_t& added_;
  int64_t seen_ = 0;
};

bool is_product(const Task& task, const Face& face) {
  return task.kind == Kind::product && face.slot == task.matrix_slot &&
         task.output_grads[0].tensor().defined();
}

/// Adds a product, rounded to `type`, in place to `grad`, which is laid out as the weight is. False if that
/// cannot be done; then nothing was done.
bool add_product_to(const at::Tensor& grad, c10::ScalarType type, const Task& task,
                    const Face& face, bool fuse, int64_t& panels_added) {
  std::optional<at::Tensor> sum = face.simple ? grad : view_along(face, grad);
  if (!sum) {
    return false;
  }
  const auto [left, right] = matrices_of(task);
  const bool sum_is_transposed = is_transposed(task, face);
  Factors f{left.matrix, right.matrix};
  if (is_subclass(grad)) {
    auto local = face.simple ? local_product({grad, sum_is_transposed}, left, right) : std::nullopt;
    if (!local) {
      return false;
    }
    sum = std::move(local->sum);
    f = {std::move(local->left), std::move(local->right)};
  }
  f = {oriented(f.left, left.is_transposed), oriented(f.right, right.is_transposed)};
  sum = oriented(*sum, sum_is_transposed);
  if (at::has_internal_overlap(*sum) != at::MemOverlap::No || sum->dim() != f.left.dim() ||
      sum->size(-2) != f.left.size(-2) || sum->size(-1) != f.right.size(-1) ||
      sum->device() != f.left.device() || sum->is_alias_of(f.left) || sum->is_alias_of(f.right)) {
    return false;
  }
  const bool adds_in_one =
      sum->scalar_type() == f.left.scalar_type() && (fuse || !sum->is_cpu()) && panels_added == 0;
  if (adds_in_one) {
    sum->dim() == 2 ? sum->addmm_(f.left, f.right) : sum->baddbmm_(f.left, f.right);
  } else if (sum->is_cpu()) {
    PanelAdder(type, panels_added).add(*sum, f);
    panels_added = 0;
  } else {
    sum->add_(f.multiply().to(type));
  }
  return true;
}

/// Adds a product in place to the gradient that the weight has. False if it has none, or one that forbids
/// it; then nothing was done.
bool add_product(const Task& task, Face& face, Weight& weight, bool fuse) {
  if (!is_product(task, face)) {
    return false;
  }
  AccumulateGrad& accumulator = *weight.accumulator;
  const std::lock_guard<std::mutex> lock(NodeParts::mutex_of(accumulator));
  const at::Tensor& grad = sum_of(weight);
  const at::Tensor& variable = accumulator.variable;
  const bool takes_products =
      grad.defined() && !grad.requires_grad() && !grad.is_complex() &&
      is_subclass(grad) == is_subclass(variable) && grad.sizes().equals(variable.sizes()) &&
      (weight.main_grad.defined() || grad.scalar_type() == variable.scalar_type());
  try {
    return takes_products &&
           add_product_to(grad, variable.scalar_type(), task, face, fuse, face.panels_added);
  } catch (...) {
    if (face.panels_added > 0) {
      face.panels_in = local_part(grad).storage().getWeakStorageImpl();
    }
    throw;
  }
}

/// Before anything is added: what a W that raised has begun can be gone on with.
void check_half_added(const Group& group, WeightPassOptions options) {
  for (const Task& task : group.tasks) {
    for (const Face& face : task.face) {
      if (face.panels_added > 0 && !(has_panels(sum_of(group.weights[face.weight]), face) &&
                                     runs_directly(group, options))) {
        refuse_half_added(group.weights[face.weight]);
      }
    }
  }
}

/// The gradient that face number `i` gives to its weight, as the accumulator expects it.
at::Tensor checked_grad(const Task& task, size_t i, const Weight& weight, variable_list& outputs) {
  variable_list grad{face_grad(task, i, outputs)};
  torch::autograd::validate_outputs(
      {Edge(weight.accumulator, 0)}, grad,
      [&](const std::string& message) { return "a weight task returned an " + message; });
  return std::move(grad[0]);
}

/// Adds what face number `i` of a product gives to the sum for its weight, and that to the weight with the
/// last face. What a W that raises has not added to the weight, its retry computes again.
void add_to_sum(const Task& task, size_t i, Weight& weight, Meeting& meeting) {
  const Face& face = task.face[i];
  at::Tensor& sum = meeting.sum;
  int64_t panels_added = 0;
  if (!sum.defined() || !sum.is_cpu() || !is_product(task, face) ||
      !add_product_to(sum, weight.accumulator->variable.scalar_type(), task, face, /*fuse=*/false,
                      panels_added)) {
    variable_list outputs;
    at::Tensor grad = checked_grad(task, i, weight, outputs);
    if (!sum.defined()) {
      sum = std::move(grad);
    } else if (grad.defined()) {
      // What is not a product may be the output gradient itself.
      const bool is_own = sum.use_count() == 1 && sum.storage().use_count() == 1;
      sum = is_own ? sum.add_(grad) : sum + grad;
    }
  }
  if (++meeting.came == meeting.faces.size()) {
    accumulate(weight, sum, nullptr);
    sum.reset();
    for (Face* other : meeting.faces) {
      other->delivered = true;
    }
  }
}

void add_directly(Group& group, Task& task, std::vector<Meeting>& meetings,
                  WeightPassOptions options) {
  std::optional<c10::Stream> stream;
  if (task.place) {
    stream = task.place->stream();
  }
  const c10::OptionalStreamGuard guard(stream);
  variable_list outputs;  // of a deferred node, which gives all its gradients at once
  if (task.kind == Kind::deferred) {
    outputs = run_deferred(task);
  }
  for (size_t i = 0; i < task.face.size(); ++i) {
    Face& face = task.face[i];
    Weight& weight = group.weights[face.weight];
    if (face.delivered || !weight.accumulator->variable.requires_grad()) {
      continue;  // or frozen since, where an accumulator would add nothing either
    }
    Meeting& meeting = meetings[face.weight];
    if (meeting.faces.size() > 1 && face.panels_added == 0 && !options.fuse) {
      add_to_sum(task, i, weight, meeting);
      continue;
    }
    if (!add_product(task, face, weight, options.fuse)) {
      if (face.panels_added > 0) {
        refuse_half_added(weight);
      }
      run_works_for(task, i, options.retain);
      const at::Tensor grad = checked_grad(task, i, weight, outputs);
      accumulate(weight, grad, options.retain ? nullptr : only_kept_grad(task, i));
    }
    face.delivered = true;
  }
}

/// See Note [The order of sums].
SmallVector<Task*, 1> in_order(Group& group) {
  SmallVector<Task*, 1> tasks;
  for (Task& task : group.tasks) {
    tasks.push_back(&task);
  }
  std::stable_sort(tasks.begin(), tasks.end(),
                   [](const Task* a, const Task* b) { return a->sequence_nr > b->sequence_nr; });
  return tasks;
}

void run_directly(Group& group, WeightPassOptions options) {
  const Range range(group);
  std::vector<Meeting> meetings = meetings_in(group);
  for (Task* task : in_order(group)) {
    add_directly(group, *task, meetings, options);
  }
  for (Weight& weight : group.weights) {
    weight.added = true;
  }
  join_streams(group);
  if (!options.retain) {
    group.release();
  }
}

/// The graph of one W, put in front of the accumulators for the time of one engine run.
class WeightGraph {
 public:
  explicit WeightGraph(bool retain) : retain_(retain), error_(std::make_shared<FirstError>()) {}

  void add(const GroupPtr& group);
  void run();

 private:
  /// What takes the places of a group's weights and of its nodes outside the closure.
  struct Mirror {
    const GroupPtr& group;
    std::vector<NodeRef<Sink>> sinks;  // null for a weight that has been added
    std::vector<NodeRef<Proxy>> proxies;

    Edge to_weight(int32_t weight) const;
  };
  void make_sinks(Mirror& mirror);
  void make_proxies(Mirror& mirror);
  void add_task(const Mirror& mirror, uint32_t t);

  const bool retain_;
  const std::shared_ptr<FirstError> error_;
  bool has_proxies_ = false;
  std::vector<GroupPtr> groups_;
  edge_list starts_;
  std::vector<Node*> represented_;
};

/// An edge to the sink of a weight whose gradient is still to be computed, else an invalid one.
Edge WeightGraph::Mirror::to_weight(int32_t weight) const {
  const bool is_wanted = sinks[weight] && !group->weights[weight].arrived;
  return is_wanted ? Edge(sinks[weight], 0) : Edge();
}

void WeightGraph::add(const GroupPtr& group) {
  Mirror mirror{group, {}, {}};
  make_sinks(mirror);
  make_proxies(mirror);
  has_proxies_ = has_proxies_ || !mirror.proxies.empty();
  groups_.push_back(group);
  for (uint32_t t = 0; t < group->tasks.size(); ++t) {
    add_task(mirror, t);
  }
}

void WeightGraph::make_sinks(Mirror& mirror) {
  const GroupPtr& group = mirror.group;
  const size_t count = group->weights.size();
  group->missing = std::count_if(group->weights.begin(), group->weights.end(),
                                 [](const Weight& weight) { return !weight.added; });
  const bool release = !retain_ && group->missing == count;
  mirror.sinks.resize(count);
  for (size_t i = 0; i < count; ++i) {
    if (group->weights[i].added) {
      continue;
    }
    mirror.sinks[i] = make_node<Sink>(group, i, error_, retain_, release);
    represented_.push_back(group->weights[i].accumulator.get());
    if (group->weights[i].arrived) {
      auto resend = make_node<Resend>(group, i);
      resend->next_edges().emplace_back(mirror.sinks[i], 0);
      starts_.emplace_back(std::move(resend), 0);
    }
  }
}

void WeightGraph::make_proxies(Mirror& mirror) {
  const std::vector<Outside>& outside = mirror.group->outside;
  for (const Outside& o : outside) {
    mirror.proxies.push_back(make_node<Proxy>(o, retain_));
    represented_.push_back(o.node);
  }
  for (size_t i = 0; i < outside.size(); ++i) {
    for (const Outside::Hop& hop : outside[i].hops) {
      mirror.proxies[i]->next_edges()[hop.slot] =
          hop.weight >= 0
              ? mirror.to_weight(hop.weight)
              : Edge(mirror.proxies[hop.outside], outside[i].node->next_edge(hop.slot).input_nr);
    }
  }
}

void WeightGraph::add_task(const Mirror& mirror, uint32_t t) {
  auto node = make_node<TaskNode>(mirror.group, t, retain_);
  const c10::ArrayRef<Face> face = mirror.group->tasks[t].face;
  for (uint32_t f = 0; f < face.size(); ++f) {
    Edge& edge = node->next_edges().emplace_back();
    if (face[f].delivered) {
      continue;
    }
    if (face[f].weight < 0) {
      edge = Edge(mirror.proxies[face[f].outside], face[f].edge.input_nr);
    } else {
      edge = mirror.to_weight(face[f].weight);
      if (edge.is_valid()) {
        mirror.sinks[face[f].weight]->served.emplace_back(t, f);
      }
    }
  }
  starts_.emplace_back(std::move(node), 0);
}

void WeightGraph::run() {
  if (starts_.empty()) {
    return;
  }
  // A task node that raises ends the run, and what proxies have released by then is gone: where there are
  // any, what may raise comes first. Where there are none, one gradient at a time is in memory.
  if (has_proxies_) {
    for (const GroupPtr& group : groups_) {
      run_works(*group, retain_);
    }
  }
  variable_list turns(starts_.size());  // the nodes need no gradient to start from
  run_engine(make_node<Start>(std::move(starts_), std::move(turns), std::move(represented_)),
             /*keep_graph=*/retain_);
  error_->rethrow();
}

/// The group is complete: nothing is held any more, and its stage outputs lose their history.
void close(Group& group, Group::State state) {
  group.state = state;
  group.release();
  const auto weights = std::exchange(group.weights, {});
  if (group.outputs.empty()) {
    return;
  }
  // Others read what autograd knows of a tensor with the GIL and under no other lock.
  const AcquireGil gil;
  for (const auto& output : std::exchange(group.outputs, {})) {
    if (auto tensor = output.lock()) {
      detach_output(at::Tensor(std::move(tensor)));
    }
  }
}

void make_ready_again(Group& group) {
  for (Weight& weight : group.weights) {
    weight.added = false;
    weight.hooked = false;
  }
  for (Task& task : group.tasks) {
    for (Face& face : task.face) {
      face.delivered = false;
    }
    for (Work& work : task.works) {
      make_ready_again(work);
    }
  }
}

/// After a W that raised: what is complete stays complete and a retry passes over it; of the rest, what
/// a retry does not need goes.
void settle(Group& group, bool retain) {
  if (group.state != Group::State::input_done || retain) {
    return;
  }
  const auto is_added = [](const Weight& weight) { return weight.added; };
  const auto is_computed = [](const Weight& weight) { return weight.added || weight.arrived; };
  if (std::all_of(group.weights.begin(), group.weights.end(), is_added)) {
    close(group, Group::State::done_unreported);
    return;
  }
  group.failed = true;
  if (std::all_of(group.weights.begin(), group.weights.end(), is_computed)) {
    group.release();
  }
}

/// A retry that meets a node without its saved tensors cannot complete its group: says which weights.
[[noreturn]] void rethrow_named(const std::vector<GroupPtr>& groups) {
  std::string lost;
  for (const GroupPtr& group : groups) {
    for (const Weight& weight : group->weights) {
      if (group->failed && !weight.added && !weight.arrived) {
        lost += c10::str(lost.empty() ? "" : ", ", weight.accumulator->variable.scalar_type(), " ",
                         weight.accumulator->variable.sym_sizes());
      }
    }
  }
  try {
    throw;
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    TORCH_CHECK(
        lost.empty() || message.find(torch::autograd::ERR_BACKWARD_TWICE) == std::string::npos,
        "the weight pass failed before, between the split nodes and these weights, and what the "
        "nodes there had saved is gone; the gradients of this microbatch cannot be added any more "
        "to the weights of ",
        lost, "; run the microbatch again");
    throw;
  }
}

}  // namespace

variable_list compute_task(const Task& task) {
  variable_list outputs;
  if (task.kind == Kind::deferred) {
    outputs = run_deferred(task);
  }
  variable_list grads;
  grads.reserve(task.face.size());
  for (size_t i = 0; i < task.face.size(); ++i) {
    grads.push_back(face_grad(task, i, outputs));
  }
  return grads;
}

void run_weight_pass(const std::vector<GroupPtr>& groups, WeightPassOptions options) {
  const Range range("zbpipe::weight_pass");
  const bool is_retry = std::any_of(groups.begin(), groups.end(),
                                    [](const GroupPtr& group) { return group->failed; });
  for (const GroupPtr& group : groups) {
    heed_new_hooks(*group);
    check_half_added(*group, options);
  }
  try {
    const at::AutoGradMode no_grad(false);
    WeightGraph graph(options.retain);
    for (const GroupPtr& group : groups) {
      if (group->state == Group::State::done_unreported) {
        continue;
      }
      follow_caller(*group);
      if (runs_directly(*group, options)) {
        run_directly(*group, options);
      } else {
        graph.add(group);
      }
    }
    graph.run();
  } catch (...) {
    for (const GroupPtr& group : groups) {
      settle(*group, options.retain);
    }
    if (is_retry) {
      rethrow_named(groups);
    }
    throw;
  }
  for (const GroupPtr& group : groups) {
    if (options.retain && group->state == Group::State::input_done) {
      make_ready_again(*group);
    } else {
      close(*group, Group::State::weight_done);
    }
  }
}

}  // namespace zbp
