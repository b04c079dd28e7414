// A process group whose ranks are threads of this process, each with a device of its own.
//
// Note [When a message is sent]
//
// As NCCL's: a rank has a stream per peer for its messages, and one for those that are posted together; that stream waits
// for the rank's own where it posts, and who waits for a work lets his stream wait for the message, not himself. A message
// is put into the streams when both its ends are posted: it is copied on the receiver's stream, after what the sender's
// waits for, and the sender's stream waits for the copy. What a message carries is kept until its work is waited for, and
// no stream is told of it. Unlike NCCL's the host waits for the other end to be posted: nothing that no rank has asked for
// yet is in a stream.

#include <Python.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <stdexcept>
#include <tuple>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "backend.h"

namespace late {

namespace {

/// One end of a message: memory as it was where it was posted, which this does not keep.
struct End {
  Use use{};
  char* data = nullptr;
  uint32_t stream = 0;  // of messages
  bool is_matched = false;
  Mark posted, done;
};
using EndRef = std::shared_ptr<End>;

/// What the ranks of one group share.
struct Exchange {
  std::mutex mutex;
  std::condition_variable news;
  std::map<std::tuple<int, int, int>, std::deque<EndRef>> waiting;  // by sender, receiver and tag
};

EndRef new_end(const at::Tensor& tensor, bool sends, uint32_t stream) {
  TORCH_CHECK(tensor.is_contiguous(), "late: a message is contiguous");
  auto end = std::make_shared<End>();
  end->stream = stream;
  end->use.writes = !sends;
  if (const size_t bytes = tensor.nbytes()) {
    const auto begin = static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
    end->use = {block_of(tensor.storage().data_ptr()), begin, begin + bytes, !sends};
    end->data = end->use.block->data + begin;
  }
  auto& schedule = Schedule::get();
  schedule.wait(stream, schedule.mark(current_stream(tensor)));
  end->posted = schedule.mark(stream);
  return end;
}

void copy(End& from, End& to) {
  const size_t bytes = from.use.end - from.use.begin;
  TORCH_CHECK(bytes == to.use.end - to.use.begin, "late: a message of ", bytes, " bytes for ",
              to.use.end - to.use.begin);
  auto& schedule = Schedule::get();
  schedule.wait(to.stream, from.posted);
  if (bytes) {
    schedule.enqueue(to.stream, "a message", {from.use, to.use},
                     [a = to.data, b = from.data, bytes] { std::memcpy(a, b, bytes); });
  }
  to.done = schedule.mark(to.stream);
  schedule.wait(from.stream, to.done);
  from.done = schedule.mark(from.stream);
}

class Message final : public c10d::Work {
 public:
  Message(std::shared_ptr<Exchange> exchange, std::vector<EndRef> ends,
          std::vector<at::Tensor> tensors, c10d::OpType type)
      : Work(-1, type),
        exchange_(std::move(exchange)),
        ends_(std::move(ends)),
        tensors_(std::move(tensors)) {}

  bool isCompleted() override {
    const std::lock_guard<std::mutex> lock(exchange_->mutex);
    return std::all_of(ends_.begin(), ends_.end(), [](const EndRef& end) {
      return end->is_matched && Schedule::get().is_done(end->done);
    });
  }

  bool wait(std::chrono::milliseconds timeout) override {
    std::unique_lock<std::mutex> lock(exchange_->mutex);
    const auto patience = timeout.count() ? timeout : std::chrono::milliseconds(30'000);
    const bool is_met = exchange_->news.wait_for(lock, patience, [this] {
      return std::all_of(ends_.begin(), ends_.end(),
                         [](const EndRef& end) { return end->is_matched; });
    });
    TORCH_CHECK(is_met, "late: nobody has posted the other end of a message within ",
                patience.count(), " ms");
    for (const EndRef& end : ends_) {
      Schedule::get().wait(current_stream(static_cast<int>(end->stream % DEVICES)), end->done);
    }
    const auto tensors = std::exchange(tensors_, {});
    lock.unlock();  // the last to let go of a tensor takes the GIL
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }

 private:
  std::shared_ptr<Exchange> exchange_;
  std::vector<EndRef> ends_;
  std::vector<at::Tensor> tensors_;
};

class Group final : public c10d::Backend {
 public:
  Group(std::shared_ptr<Exchange> exchange, int rank, int size, bool coalesces)
      : Backend(rank, size), exchange_(std::move(exchange)), coalesces_(coalesces) {}

  const std::string getBackendName() const override { return "late"; }
  bool supportsCoalescing() const override { return coalesces_; }

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    return post(tensors.at(0), true, {getRank(), to, tag}, to);
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from,
                                      int tag) override {
    return post(tensors.at(0), false, {from, getRank(), tag}, from);
  }

  void startCoalescing() override { is_coalescing_ = true; }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    is_coalescing_ = false;
    return c10::make_intrusive<Message>(exchange_, std::exchange(ends_, {}),
                                        std::exchange(tensors_, {}), c10d::OpType::COALESCED);
  }

 private:
  using Key = std::tuple<int, int, int>;

  c10::intrusive_ptr<c10d::Work> post(const at::Tensor& tensor, bool sends, Key key, int peer) {
    const auto end = new_end(
        tensor, sends, stream_for(tensor.device().index(), is_coalescing_ ? getRank() : peer));
    match(end, key);
    std::vector<at::Tensor> tensors{tensor};
    if (is_coalescing_) {
      ends_.push_back(end);
      tensors_.push_back(std::exchange(tensors, {})[0]);
    }
    return c10::make_intrusive<Message>(exchange_, std::vector<EndRef>{end}, std::move(tensors),
                                        sends ? c10d::OpType::SEND : c10d::OpType::RECV);
  }

  void match(const EndRef& end, const Key& key) {
    const std::lock_guard<std::mutex> lock(exchange_->mutex);
    auto& waiting = exchange_->waiting[key];
    if (waiting.empty() || waiting.front()->use.writes == end->use.writes) {
      waiting.push_back(end);
      return;
    }
    const EndRef other = waiting.front();
    waiting.pop_front();
    copy(end->use.writes ? *other : *end, end->use.writes ? *end : *other);
    end->is_matched = other->is_matched = true;
    exchange_->news.notify_all();
  }

  uint32_t stream_for(c10::DeviceIndex device, int peer) {
    const auto [place, is_new] = streams_.try_emplace(peer);
    if (is_new) {
      place->second = Schedule::get().new_stream(device);
    }
    return place->second;
  }

  std::shared_ptr<Exchange> exchange_;
  bool coalesces_;
  bool is_coalescing_ = false;
  std::vector<EndRef> ends_;  // posted together, and what they carry
  std::vector<at::Tensor> tensors_;
  std::map<int, uint32_t> streams_;
};

}  // namespace

}  // namespace late

extern "C" {

/// The backend of one rank, as Python sees it; a new reference. `number`: of the group, the same for its ranks.
PyObject* late_new_group(int64_t number, int rank, int size, bool coalesces) {
  static std::mutex mutex;
  static auto* exchanges = new std::map<int64_t, std::weak_ptr<late::Exchange>>;
  std::shared_ptr<late::Exchange> exchange;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    exchange = (*exchanges)[number].lock();
    if (!exchange) {
      (*exchanges)[number] = exchange = std::make_shared<late::Exchange>();
    }
  }
  c10::intrusive_ptr<c10d::Backend> group =
      c10::make_intrusive<late::Group>(std::move(exchange), rank, size, coalesces);
  return pybind11::cast(std::move(group)).release().ptr();
}
}
