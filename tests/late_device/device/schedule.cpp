#include "schedule.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace late {

namespace {

constexpr int NOTHING =
    0xFF;  // bytes of memory that nobody has written: NaN in every floating dtype

void join(Clock& into, const Clock& other) {
  into.resize(std::max(into.size(), other.size()));
  for (size_t i = 0; i < other.size(); ++i) {
    into[i] = std::max(into[i], other[i]);
  }
}

bool comes_before(Point point, const Clock& clock) {
  return point.stream < clock.size() && clock[point.stream] >= point.seq;
}

std::string name_of(Point point) {
  return "late:" + std::to_string(point.stream % DEVICES) + " stream " +
         std::to_string(point.stream / DEVICES);
}

}  // namespace

Schedule& Schedule::get() {
  static auto* schedule = new Schedule;  // tensors die until the very end
  return *schedule;
}

Schedule::Stream& Schedule::at(uint32_t stream) {
  while (streams_.size() <= stream) {
    streams_.emplace_back();
  }
  return streams_[stream];
}

uint32_t Schedule::new_stream(int device) {
  const Lock lock(mutex_);
  const uint32_t number = stream_number(device, ++next_id_[device]);
  at(number);
  return number;
}

bool Schedule::exists(uint32_t stream) {
  const Lock lock(mutex_);
  return stream / DEVICES <= next_id_[stream % DEVICES];
}

void Schedule::set_order(Order order, uint64_t seed) {
  const Lock lock(mutex_);
  order_ = order;
  random_.seed(seed);
}

void Schedule::separate_hosts() {
  const Lock lock(mutex_);
  has_hosts_ = true;
}

// ---- tasks come

uint64_t Schedule::push(uint32_t stream, Task task) {
  Stream& s = at(stream);
  join(s.clock, host_of(stream));
  s.clock.resize(std::max<size_t>(s.clock.size(), stream + 1));
  s.tasks.push_back(std::move(task));
  return s.clock[stream] = s.done + s.tasks.size();
}

bool Schedule::is_behind_every_host(Point point) {
  return comes_before(point, hosts_[0]) && (!has_hosts_ || comes_before(point, hosts_[1]));
}

void Schedule::check(Block& block, const Touch& touch, const Clock& clock) {
  auto& touches = block.touches;
  for (const Touch& other : touches) {
    if (other.begin < touch.end && touch.begin < other.end && (other.writes || touch.writes) &&
        !comes_before(other.at, clock)) {
      races_.insert(touch.name + " on " + name_of(touch.at) + " is not ordered after " +
                    other.name + " on " + name_of(other.at));
    }
  }
  touches.erase(
      std::remove_if(
          touches.begin(), touches.end(),
          [&](const Touch& other) {
            const bool is_same = other.at.stream == touch.at.stream && other.writes == touch.writes;
            const bool is_within = other.begin >= touch.begin && other.end <= touch.end;
            return is_behind_every_host(other.at) ||
                   (comes_before(other.at, clock) && is_within && (touch.writes || is_same));
          }),
      touches.end());
  touches.push_back(touch);
}

void Schedule::enqueue(uint32_t stream, const std::string& name, const std::vector<Use>& uses,
                       std::function<void()> run) {
  const Lock lock(mutex_);
  if (is_part(stream)) {
    captured_.push_back({name, uses, std::exchange(run, nullptr)});
  }
  const Point point{stream, push(stream, {std::move(run), {}})};
  at(stream).last_task = point.seq;
  for (const Use& use : uses) {
    check(*use.block, {point, use.begin, use.end, use.writes, name}, at(stream).clock);
  }
  if (order_ == Order::at_once) {
    reach(point);
  }
}

Mark Schedule::mark_of(uint32_t stream) {
  Stream& s = at(stream);
  join(s.clock, host_of(stream));
  return {{stream, s.done + s.tasks.size()}, s.clock, is_part(stream) ? captures_ : 0};
}

Mark Schedule::mark(uint32_t stream) {
  const Lock lock(mutex_);
  return mark_of(stream);
}

void Schedule::wait(uint32_t stream, const Mark& mark) {
  const Lock lock(mutex_);
  if (!parts_.empty() && mark.capture == captures_) {
    if (stream / DEVICES == 0) {
      throw std::runtime_error("the default stream cannot wait for a capture");
    }
    parts_.insert(stream);
  } else if (is_part(stream)) {
    throw std::runtime_error("a captured stream cannot wait for what is outside of the capture");
  } else {
    refuse_captured(mark);
  }
  join(at(stream).clock, mark.clock);
  const Point point{stream, push(stream, {nullptr, mark.at})};
  if (order_ == Order::at_once) {
    reach(point);
  }
}

// ---- tasks run

bool Schedule::can_run(const Stream& stream) {
  return !stream.tasks.empty() && is_done(stream.tasks.front().after);
}

void Schedule::run_front(Stream& stream) {
  if (const auto& run = stream.tasks.front().run) {
    try {
      run();
    } catch (const std::exception& error) {
      error_ = error_.empty() ? error.what() : error_;
    }
  }
  stream.tasks.pop_front();
  ++stream.done;
  take_back();
}

void Schedule::run_others(uint32_t but) {
  for (bool has_run = true; has_run;) {
    has_run = false;
    for (uint32_t s = 0; s < streams_.size(); ++s) {
      while (s != but && can_run(streams_[s])) {
        run_front(streams_[s]);
        has_run = true;
      }
    }
  }
}

void Schedule::run_any() {
  std::vector<Stream*> ready;
  for (Stream& stream : streams_) {
    if (can_run(stream)) {
      ready.push_back(&stream);
    }
  }
  run_front(*ready[random_() % ready.size()]);
}

void Schedule::reach(Point point) {
  while (!is_done(point)) {
    if (order_ == Order::random) {
      run_any();
      continue;
    }
    if (order_ == Order::others_first) {
      run_others(point.stream);
    }
    Stream& stream = at(point.stream);
    if (can_run(stream)) {
      run_front(stream);
    } else {
      reach(Point(stream.tasks.front().after));
    }
  }
}

bool Schedule::is_done(const Mark& mark) {
  const Lock lock(mutex_);
  const bool is_reached = is_done(mark.at);
  if (is_reached) {
    join(host_of(mark.at.stream), mark.clock);
  }
  return is_reached;
}

void Schedule::raise_error() {
  if (!error_.empty()) {
    throw std::runtime_error("a task of the late device failed: " + std::exchange(error_, ""));
  }
}

void Schedule::refuse_captured(const Mark& mark) {
  if (mark.capture != 0) {
    throw std::runtime_error("nobody outside of a capture can wait for what is captured");
  }
}

void Schedule::finish(const Mark& mark) {
  const Lock lock(mutex_);
  refuse_captured(mark);
  ++host_waits;
  reach(mark.at);
  join(host_of(mark.at.stream), mark.clock);
  raise_error();
}

void Schedule::finish_all(int device) {
  const Lock lock(mutex_);
  if (!parts_.empty()) {
    throw std::runtime_error("the host cannot wait for a device within a capture");
  }
  ++host_waits;
  for (uint32_t s = 0; s < streams_.size(); ++s) {
    if (device < 0 || s % DEVICES == static_cast<uint32_t>(device)) {
      const Mark mark = mark_of(s);
      reach(mark.at);
      join(host_of(s), mark.clock);
    }
  }
  raise_error();
}

// ---- memory
//
// Note [When a block is given away]
//
// A block that only its own stream uses is given away at once: the next allocation there has it, and the stream writes
// it over when it comes so far. One that was recorded on other streams is given away when those have done what they had
// been given when it was freed. Whoever else still reads it finds NaN, or what its new owner wrote.

Block* Schedule::allocate(size_t asked, uint32_t stream) {
  const Lock lock(mutex_);
  const size_t size = (asked + 511) / 512 * 512;
  const auto found = std::find_if(pool_.rbegin(), pool_.rend(), [&](const Block* block) {
    return block->size == size && block->stream == stream;
  });
  Block* block = nullptr;
  if (found != pool_.rend()) {
    block = *found;
    pool_.erase(std::next(found).base());
  } else {
    block = new Block;
    blocks_.push_back(block);
    block->data = static_cast<char*>(std::aligned_alloc(512, size));
    block->size = size;
    block->stream = stream;
    std::memset(block->data, NOTHING, size);
  }
  block->asked = asked;
  block->is_captured = is_part(stream);
  bytes += asked;
  return block;
}

void Schedule::record(Block* block, uint32_t stream) {
  const Lock lock(mutex_);
  auto& users = block->users;
  if (stream != block->stream && std::find(users.begin(), users.end(), stream) == users.end()) {
    users.push_back(stream);
  }
}

void Schedule::write_over(Block* block) {
  std::function<void()> run = [block] { std::memset(block->data, NOTHING, block->size); };
  if (is_part(block->stream)) {
    captured_.push_back(
        {"giving memory away", {{block, 0, block->size, true}}, std::exchange(run, nullptr)});
  }
  const Point point{block->stream, push(block->stream, {run, {}})};
  check(*block, {point, 0, block->size, true, "giving memory away"}, at(block->stream).clock);
  if (order_ == Order::at_once) {
    reach(point);
  }
}

void Schedule::give_away(uint64_t data) {
  const Lock lock(mutex_);
  for (Block* block : blocks_) {
    if (reinterpret_cast<uint64_t>(block->data) == data) {
      write_over(block);
    }
  }
}

void Schedule::free(Block* block) {
  const Lock lock(mutex_);
  bytes -= block->asked;
  const std::vector<uint32_t> users = std::exchange(block->users, {});
  if (block->is_captured || !parts_.empty()) {
    if (users.empty() && is_part(block->stream)) {
      write_over(block);
    }
    return;  // a replay will use it again
  }
  if (users.empty()) {
    write_over(block);
    pool_.push_back(block);
    return;
  }
  Returned returned{{}, block};
  Clock clock;
  const Mark own = mark_of(block->stream);
  returned.after.push_back(own.at);
  join(clock, own.clock);
  for (const uint32_t user : users) {
    const Mark mark = mark_of(user);
    returned.after.push_back(mark.at);
    join(clock, mark.clock);
  }
  // The host will see the events of all these streams done: then the block is free for everybody.
  check(*block, {own.at, 0, block->size, true, "giving memory away"}, clock);
  block->touches.clear();
  returned_.push_back(std::move(returned));
  take_back();
}

void Schedule::take_back() {
  for (size_t i = 0; i < returned_.size();) {
    const Returned& returned = returned_[i];
    if (std::all_of(returned.after.begin(), returned.after.end(),
                    [&](Point point) { return is_done(point); })) {
      std::memset(returned.block->data, NOTHING, returned.block->size);
      pool_.push_back(returned.block);
      returned_.erase(returned_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
}

// ---- captures

void Schedule::begin_capture(uint32_t stream) {
  const Lock lock(mutex_);
  ++captures_;
  first_part_ = stream;
  parts_ = {stream};
  captured_.clear();
}

void Schedule::end_capture() {
  const Lock lock(mutex_);
  const Clock end = mark_of(first_part_).clock;
  bool has_lost = false;
  for (const uint32_t part : std::exchange(parts_, {})) {
    const Mark mark = mark_of(part);
    has_lost |= at(part).last_task != 0 && !comes_before({part, at(part).last_task}, end);
    reach(mark.at);  // which does nothing: what comes next is ordered behind the replays alone
    join(host_of(part), mark.clock);
  }
  if (has_lost) {
    throw std::runtime_error("a stream of the capture has not come back to its first one");
  }
}

bool Schedule::is_captured(uint32_t stream) {
  const Lock lock(mutex_);
  return is_part(stream);
}

void Schedule::replay(uint32_t stream) {
  std::vector<Captured> tasks;
  {
    const Lock lock(mutex_);
    tasks = captured_;
  }
  for (auto& task : tasks) {
    enqueue(stream, "a replay's " + task.name, task.uses, std::move(task.run));
  }
}

// ---- what is told

std::string Schedule::races() {
  const Lock lock(mutex_);
  std::string text;
  for (const std::string& race : races_) {
    text += race + "\n";
  }
  return text;
}

void Schedule::forget() {
  const Lock lock(mutex_);
  races_.clear();
  error_.clear();
  for (const Stream& stream : streams_) {
    if (!stream.tasks.empty()) {
      return;
    }
  }
  streams_.clear();  // a clock has a place for each
  for (Clock& host : hosts_) {
    host.clear();
  }
  has_hosts_ = false;
  std::fill(std::begin(next_id_), std::end(next_id_), 0);
  for (Block* block : blocks_) {
    block->touches.clear();
  }
}

}  // namespace late
