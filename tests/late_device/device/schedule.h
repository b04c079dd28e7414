// Streams of a device that runs late: nothing runs before somebody waits for it.
//
// Note [What runs when]
//
// A stream is a queue of tasks. The host puts tasks in and goes on; they run, one at a time, on the thread that waits (it
// reads a value, synchronises a stream), in an order that only streams and events bind:
//
// - lazy: what the wait needs, and nothing else: who forgets to wait for a writer reads what was there before.
// - others_first: the other streams as far as they can go, then what the wait needs: who lets a writer pass, or gives
//   memory away that another stream still reads, finds it written over.
// - random: any stream's next task, drawn from a seed.
// - at_once: each task as it is put in, as on a device that is not asynchronous.
//
// Besides, each task knows by a clock which tasks are bound to come before it. Two that touch the same bytes, one of them
// writing, and that nothing binds are a race, told whatever the order was.
//
// Note [Captures]
//
// As on CUDA a capture begins with one stream. A stream that waits for one of the capture's becomes part of it, the
// default stream may not. Tasks of these streams are kept, in the order in which they came, and do not run; races
// between them are told at once. None of these streams may wait for what is outside, nor the host or another stream for
// them, and all have come back to the first one at the end. Other streams run as ever. What is freed is not used again
// within the capture, but filled with NaN in the order of its stream.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace late {

constexpr int DEVICES = 2;

/// The `seq`-th task of a stream, counted from 1.
struct Point {
  uint32_t stream = 0;
  uint64_t seq = 0;
};

/// Per stream, how many of its first tasks come before.
using Clock = std::vector<uint64_t>;

/// A place in a stream, and what comes before it.
struct Mark {
  Point at;
  Clock clock;
  uint64_t capture = 0;  // the number of the capture that the stream was part of, if any
};

/// Who touched which bytes of a block.
struct Touch {
  Point at;
  size_t begin;
  size_t end;
  bool writes;
  std::string name;
};

struct Block {
  char* data = nullptr;
  size_t size = 0;
  size_t asked = 0;
  uint32_t stream = 0;          // where it was allocated
  std::vector<uint32_t> users;  // streams on which it was recorded
  bool is_captured = false;     // a graph uses it, for good
  std::vector<Touch> touches;
};

struct Use {
  Block* block;
  size_t begin;
  size_t end;
  bool writes;
};

enum class Order : int { lazy, others_first, random, at_once };

class Schedule {
 public:
  static Schedule& get();

  uint32_t new_stream(int device);
  bool exists(uint32_t stream);
  void set_order(Order order, uint64_t seed);
  /// Each device has a host of its own, which knows what it has seen done itself: until what is known is forgotten.
  void separate_hosts();

  void enqueue(uint32_t stream, const std::string& name, const std::vector<Use>& uses,
               std::function<void()> run);
  Mark mark(uint32_t stream);
  void wait(uint32_t stream, const Mark& mark);
  bool is_done(const Mark& mark);
  /// The host waits; what a task raised is raised here.
  void finish(const Mark& mark);
  void finish_all(int device);

  Block* allocate(size_t bytes, uint32_t stream);
  void free(Block* block);
  void record(Block* block, uint32_t stream);
  /// Of the block that begins at this address: as if it had been freed.
  void give_away(uint64_t data);
  /// Of what is allocated.
  size_t bytes = 0;

  /// See Note [Captures].
  void begin_capture(uint32_t stream);
  void end_capture();
  bool is_captured(uint32_t stream);
  /// The tasks of the last capture, on this stream.
  void replay(uint32_t stream);

  std::string races();
  void forget();

  /// How often the host has waited for a stream, a device or an event.
  int64_t host_waits = 0;

 private:
  struct Task {
    std::function<void()> run;
    Point after;
  };
  struct Stream {
    std::deque<Task> tasks;
    uint64_t done = 0;
    uint64_t last_task = 0;  // no wait, and no giving away of memory
    Clock clock;
  };
  struct Captured {
    std::string name;
    std::vector<Use> uses;
    std::function<void()> run;
  };
  struct Returned {
    std::vector<Point> after;
    Block* block;
  };

  using Lock = std::lock_guard<std::mutex>;
  Stream& at(uint32_t stream);
  bool is_done(Point point) { return at(point.stream).done >= point.seq; }
  bool can_run(const Stream& stream);
  uint64_t push(uint32_t stream, Task task);
  void write_over(Block* block);
  void check(Block& block, const Touch& touch, const Clock& clock);
  void run_front(Stream& stream);
  void run_others(uint32_t but);
  void run_any();
  void reach(Point point);
  void take_back();
  bool is_part(uint32_t stream) { return parts_.count(stream) != 0; }
  void refuse_captured(const Mark& mark);
  Mark mark_of(uint32_t stream);
  Clock& host_of(uint32_t stream) { return hosts_[has_hosts_ ? stream % DEVICES : 0]; }
  bool is_behind_every_host(Point point);
  void raise_error();

  std::mutex mutex_;
  std::deque<Stream> streams_;
  uint32_t next_id_[DEVICES] = {};
  Clock hosts_[DEVICES];  // or the first one's alone
  bool has_hosts_ = false;
  Order order_ = Order::lazy;
  std::mt19937_64 random_;
  std::vector<Block*> blocks_;  // all there are
  std::vector<Block*> pool_;    // those that nobody has
  std::vector<Returned> returned_;
  std::set<std::string> races_;
  uint64_t captures_ = 0;     // how many there have been
  std::set<uint32_t> parts_;  // of the capture that is under way
  uint32_t first_part_ = 0;
  std::vector<Captured> captured_;
  std::string error_;
};

inline uint32_t stream_number(int device, int64_t id) {
  return static_cast<uint32_t>(id * DEVICES + device);
}

}  // namespace late
