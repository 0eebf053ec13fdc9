// torch.distributed backend "ccl": c10d collectives on CPU tensors over Intel oneCCL.
//
// Read it from the bottom: BackendCcl turns each c10d call into an Operation, a list of oneCCL
// calls; Engine starts operations in order and asks oneCCL until they are done. With its workers
// off, oneCCL makes progress only while somebody asks. So whoever waits drives: the caller in
// wait(), otherwise the engine's thread.
//
// Interfaces: torch's c10d/Backend.hpp and c10d/Work.hpp; oneCCL's API manual
// (uxlfoundation.github.io/oneCCL). The notebook that teaches it: 07_collectives.

#include <oneapi/ccl.hpp>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/extension.h>

#include <pybind11/chrono.h>

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <future>
#include <list>
#include <mutex>
#include <thread>

namespace {

using c10d::OpType;
using c10d::ReduceOp;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// MPI counts with 32 bits: longer messages go in pieces. Tests set a smaller limit.
const size_t kMaxBytes = [] {
  const char* value = std::getenv("CCL_BACKEND_MAX_BYTES");
  return value ? std::stoull(value) : size_t(1) << 30;
}();

double seconds(milliseconds time) { return double(time.count()) / 1000; }

// ---------------------------------------------------------------- groups and operations

// What operations need of their group. They share it, so that it outlives them.
struct Group {
  ccl::communicator communicator;
  const std::string place;  // "on rank 0 of 2 (host node1)"
  std::atomic<bool> broken{false};
  // operations in flight, counted apart from the group: see Operation::complete
  const std::shared_ptr<std::atomic<int>> pending = std::make_shared<std::atomic<int>>(0);
};

using GroupPtr = std::shared_ptr<Group>;

// A c10d Work and what it takes to do it: `calls` start it, `events` are then in flight, and
// `finish` runs when all are done (divides, copies back).
class Operation : public c10d::Work {
 public:
  Operation(GroupPtr group, int rank, OpType type, const char* name, Tensors inputs,
            Tensors outputs, milliseconds timeout)
      : Work(rank, type, name, inputs),
        group(std::move(group)),
        name(name),
        place(this->group->place),
        timeout(timeout),
        deadline(Clock::now() + timeout),
        keep(std::move(inputs)),
        outputs(std::move(outputs)),
        future(c10::make_intrusive<at::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {}

  bool wait(milliseconds limit) override;
  bool isCompleted() override { return done; }
  bool isSuccess() const override { return done && !error; }
  std::exception_ptr exception() const override { return done ? error : nullptr; }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<at::ivalue::Future> getFuture() override { return future; }

  std::string title() const { return c10::str(name, " ", place, ": "); }

  std::exception_ptr failure(const std::string& reason) const {
    try {
      TORCH_CHECK_WITH(DistBackendError, false, title(), reason);
    } catch (...) {
      return std::current_exception();
    }
  }

  // Without the engine's lock: finishing may take a while.
  void complete(std::exception_ptr problem) {
    at::AutoDispatchBelowADInplaceOrView plain;  // results are data, not part of a graph
    try {
      if (!problem) {
        for (auto& step : finish) step();
      }
    } catch (...) {
      problem = std::current_exception();
    }
    finish.clear();
    if (!problem) keep.clear();
    error = problem;
    if (recordFunctionEndCallback_) recordFunctionEndCallback_();
    // Let go of the group first: its last owner must be the thread that closes it. Another one
    // might still be at it while the process ends.
    const auto pending = group->pending;
    group.reset();
    done = true;
    --*pending;
  }

  // Runs the callbacks, which may start operations and wait for them.
  void complete_future() {
    if (error) {
      future->setError(error);
    } else {
      future->markCompleted(at::IValue(outputs));
    }
  }

  GroupPtr group;
  const char* const name;
  const std::string place;
  const milliseconds timeout;
  const Clock::time_point deadline;
  std::atomic<bool> launched{false};
  bool asynchronous = false;
  std::vector<std::function<ccl::event(const ccl::communicator&)>> calls;
  std::vector<std::function<void()>> finish;
  std::vector<ccl::event> events;
  Tensors keep;
  Tensors outputs;

 private:
  std::atomic<bool> done{false};
  std::exception_ptr error;
  const c10::intrusive_ptr<at::ivalue::Future> future;
};

using OperationPtr = c10::intrusive_ptr<Operation>;

// ---------------------------------------------------------------- the engine

// Threads that complete futures: never those that drive, since callbacks may wait for operations.
class Completions {
 public:
  void add(OperationPtr operation) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(operation));
    ++busy_;
    if (idle_ >= queue_.size()) {
      wake_.notify_one();
    } else {
      std::thread([this] { run(); }).detach();
    }
  }

  // Waits until no callback runs or waits, for so long at most. To be called before Python ends:
  // a thread that asks a dead Python for its lock brings the process down.
  void drain(milliseconds limit) {
    std::unique_lock<std::mutex> lock(mutex_);
    quiet_.wait_for(lock, limit, [this] { return busy_ == 0; });
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      ++idle_;
      wake_.wait(lock, [this] { return !queue_.empty(); });
      --idle_;
      auto operation = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      operation->complete_future();
      operation.reset();
      lock.lock();
      if (--busy_ == 0) quiet_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<OperationPtr> queue_;
  std::condition_variable quiet_;
  size_t idle_ = 0;
  size_t busy_ = 0;
};

class Engine {
 public:
  // Never destroyed: its thread lives as long as the process.
  static Engine& get() {
    static Engine* engine = new Engine;
    return *engine;
  }

  void submit(const OperationPtr& operation, bool asynchronous) {
    ++*operation->group->pending;
    operation->launched = true;
    operation->asynchronous = asynchronous;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      waiting_.push_back(operation);
    }
    if (asynchronous) wake_.notify_one();
  }

  // Drives all operations until `done()`; false where the deadline came first.
  template <typename Done>
  bool drive(Done done, Clock::time_point deadline) {
    bool in_time = true;
    ++drivers_;
    for (int idle = 0; in_time && !done();) {
      idle = step() ? 0 : rest(idle);
      if (idle > kSpins) in_time = Clock::now() < deadline;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (--drivers_ == 0 && busy()) wake_.notify_one();
    return in_time;
  }

  // oneCCL may wait for ever for a peer: its threads and buffers are left alone from now on, and
  // the process ends without oneCCL's own end, which would wait as well.
  void give_up() { given_up_ = true; }

  // Whether something is still in flight after so long, or was given up: its end may never come.
  bool unfinished(milliseconds limit) {
    const auto idle = [this] {
      std::lock_guard<std::mutex> lock(mutex_);
      return !busy();
    };
    return !drive(idle, Clock::now() + limit) || given_up_;
  }

  void drain(milliseconds limit) { completions_.drain(limit); }

  std::mutex mutex_;  // held while oneCCL is called

 private:
  static constexpr int kSpins = 200;
  static constexpr std::chrono::microseconds kPoll{100};

  Engine() {
    on_exit([](int status, void*) { Engine::get().stop(status); }, nullptr);
    std::thread([this] { run(); }).detach();
  }

  // At exit, before oneCCL's own end. The lock is kept, so that nothing calls oneCCL any more.
  void stop(int status) {
    bool locked = false;
    for (int tries = 0; !locked && tries < 1000; ++tries) {
      locked = mutex_.try_lock();
      if (!locked) std::this_thread::sleep_for(milliseconds(1));
    }
    if (!locked || given_up_ || busy()) {
      fflush(nullptr);
      _exit(status);
    }
  }

  // Sleeps between its looks: it shares a core with the rank's computation.
  void run() {
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return drivers_ == 0 && busy(); });
      }
      if (!step()) std::this_thread::sleep_for(kPoll);
    }
  }

  bool busy() const { return !waiting_.empty() || !flying_.empty(); }

  static int rest(int idle) {
    if (idle > kSpins) std::this_thread::yield();
    return idle + 1;
  }

  // Starts what waits and asks what flies; true where an operation came to its end.
  bool step() {
    std::vector<std::pair<OperationPtr, std::exception_ptr>> ended;
    {
      std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
      if (!lock) return false;
      for (; !waiting_.empty(); waiting_.pop_front()) flying_.push_back(waiting_.front());
      for (auto it = flying_.begin(); it != flying_.end();) {
        std::exception_ptr problem;
        if (advance(**it, problem)) {
          ended.emplace_back(std::move(*it), problem);
          it = flying_.erase(it);
        } else {
          ++it;
        }
      }
    }
    for (auto& [operation, problem] : ended) {
      operation->complete(problem);
      // nobody has the future of a call that blocks
      operation->asynchronous ? completions_.add(operation) : operation->complete_future();
    }
    return !ended.empty();
  }

  // True where the operation is at its end, well or with a problem.
  bool advance(Operation& operation, std::exception_ptr& problem) {
    try {
      auto& events = operation.events;
      if (!operation.group->broken) {
        for (auto& call : operation.calls) events.push_back(call(operation.group->communicator));
        operation.calls.clear();
        while (!events.empty() && events.back().test()) events.pop_back();
        if (events.empty()) return true;
        if (Clock::now() < operation.deadline) return false;
        problem = operation.failure(c10::str(
            "no end after ", seconds(operation.timeout), " s. A peer is dead, slow, or in another "
            "collective. End all ranks, or destroy the group and make it again."));
      } else {
        problem = operation.failure("the group was aborted, or broken by an earlier failure.");
      }
    } catch (const std::exception& cause) {
      problem = operation.failure(cause.what());
    }
    // oneCCL may still use the events, the tensors and the communicator: never freed.
    operation.group->broken = true;
    if (!operation.events.empty()) new OperationPtr(OperationPtr::reclaim_copy(&operation));
    give_up();
    return true;
  }

  Completions completions_;
  std::condition_variable wake_;
  std::deque<OperationPtr> waiting_;
  std::list<OperationPtr> flying_;
  std::atomic<int> drivers_{0};
  std::atomic<bool> given_up_{false};
};

bool Operation::wait(milliseconds limit) {
  TORCH_CHECK_WITH(DistBackendError, launched, title(),
                   "wait() inside a coalescing block, or after one that raised");
  const auto until = limit == kNoTimeout ? Clock::time_point::max() : Clock::now() + limit;
  const bool in_time = Engine::get().drive([this] { return isCompleted(); }, until);
  TORCH_CHECK_WITH(DistBackendError, in_time, title(), "not done after ", seconds(limit),
                   " s of wait()");
  if (error) std::rethrow_exception(error);
  return true;
}

// ---------------------------------------------------------------- types, reductions, buffers

ccl::datatype datatype_of(const Operation& op, const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return ccl::datatype::float32;
    case at::kDouble: return ccl::datatype::float64;
    case at::kBFloat16: return ccl::datatype::bfloat16;
    case at::kHalf: return ccl::datatype::float16;
    case at::kChar: return ccl::datatype::int8;
    case at::kByte: case at::kBool: return ccl::datatype::uint8;
    case at::kShort: return ccl::datatype::int16;
    case at::kInt: return ccl::datatype::int32;
    case at::kLong: return ccl::datatype::int64;
    default: TORCH_CHECK_TYPE(false, op.title(), "no collective for ", tensor.scalar_type());
  }
}

// A bool holds 0 or 1, so its sum is their maximum ("or"), its product their minimum ("and").
ccl::reduction reduction_of(const Operation& op, const ReduceOp& how, const at::Tensor& tensor) {
  const bool is_bool = tensor.scalar_type() == at::kBool;
  switch (how.op_) {
    case ReduceOp::SUM: return is_bool ? ccl::reduction::max : ccl::reduction::sum;
    case ReduceOp::PRODUCT: return is_bool ? ccl::reduction::min : ccl::reduction::prod;
    case ReduceOp::MIN: return ccl::reduction::min;
    case ReduceOp::MAX: return ccl::reduction::max;
    case ReduceOp::AVG:  // a sum, divided when it is there
      TORCH_CHECK_TYPE(tensor.is_floating_point(), op.title(),
                       "AVG is for floating-point tensors, got ", tensor.scalar_type());
      return ccl::reduction::sum;
    default:
      TORCH_CHECK_VALUE(false, op.title(),
                        "unknown reduction. There are SUM, AVG, PRODUCT, MIN and MAX");
  }
}

// The tensor's data, without its graph.
at::Tensor checked(const Operation& op, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, op.title(),
                    "sparse tensors are not supported, call to_dense()");
  TORCH_CHECK_VALUE(tensor.is_cpu(), op.title(), "tensor is on ", tensor.device(),
                    ", move it to the CPU: the ccl backend works there");
  datatype_of(op, tensor);
  return tensor.detach();
}

// Buffers are contiguous: the tensor itself, or a copy of it that lives as long as the operation.

at::Tensor input(Operation& op, const at::Tensor& tensor) {
  op.keep.push_back(checked(op, tensor).contiguous());
  return op.keep.back();
}

at::Tensor output(Operation& op, const at::Tensor& tensor) {
  auto target = checked(op, tensor);
  op.keep.push_back(target.contiguous());
  auto buffer = op.keep.back();
  if (!buffer.is_same(target)) op.finish.emplace_back([=] { target.copy_(buffer); });
  return buffer;
}

void* address(const at::Tensor& buffer, size_t element) {
  return static_cast<char*>(buffer.data_ptr()) + element * buffer.element_size();
}

template <typename Piece>
void each_piece(const at::Tensor& buffer, Piece piece) {
  const size_t total = buffer.numel();
  const size_t most = std::max<size_t>(1, kMaxBytes / buffer.element_size());
  for (size_t from = 0; from < total; from += most) piece(from, std::min(most, total - from));
}

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

// ---------------------------------------------------------------- the backend

class BackendCcl : public c10d::Backend {
 public:
  BackendCcl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
             milliseconds timeout)
      : Backend(rank, size), timeout_(timeout) {
    char host[256] = {};
    gethostname(host, sizeof(host) - 1);
    const auto place = c10::str("on rank ", rank, " of ", size, " (host ", host, ")");
    // oneCCL waits for ever, for a peer that is dead or behind the wrong network interface. So all
    // must be at the door before one enters, and entering has a limit, too.
    const auto key = [](int peer) { return "ccl/" + std::to_string(peer); };
    store->set(key(rank), std::string("here"));
    const auto deadline = Clock::now() + timeout;
    for (int peer = 0; peer < size; ++peer) {
      while (!store->check({key(peer)})) {
        TORCH_CHECK_WITH(DistBackendError, Clock::now() < deadline, "ccl:init ", place, ": rank ",
                         peer, " did not come within ", seconds(timeout), " s");
        std::this_thread::sleep_for(milliseconds(2));
      }
    }
    auto made = std::make_shared<std::promise<GroupPtr>>();
    auto group = made->get_future();
    std::thread([=] {
      try {
        made->set_value(GroupPtr(new Group{connect(*store, rank, size), place}));
      } catch (...) {
        made->set_exception(std::current_exception());
      }
    }).detach();
    if (group.wait_until(deadline) != std::future_status::ready) {
      Engine::get().give_up();
      TORCH_CHECK_WITH(DistBackendError, false, "ccl:init ", place, ": no connection within ",
                       seconds(timeout), " s. On hosts with several network interfaces, name the "
                       "right one: CCL_KVS_IFACE and FI_TCP_IFACE");
    }
    try {
      group_ = group.get();
    } catch (const std::exception& cause) {
      TORCH_CHECK_WITH(DistBackendError, false, "ccl:init ", place, ": ", cause.what());
    }
    Engine::get();  // its exit handler comes after oneCCL's, so it runs before
  }

  // Waits for the operations in flight: each has a deadline.
  void shutdown() override {
    if (!group_) return;
    Engine::get().drive([this] { return *group_->pending == 0; }, Clock::time_point::max());
    group_.reset();
  }

  void abort() override {
    if (group_) group_->broken = true;
    shutdown();
  }

  const std::string getBackendName() const override { return "ccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  // ---- coalescing: what comes between start and end becomes one operation

  bool supportsCoalescing() const override { return true; }

  void startCoalescing() override {
    coalesced_ = make(OpType::COALESCED, "ccl:coalesced", {}, {}, c10d::kUnsetTimeout);
  }

  WorkPtr endCoalescing() override {
    TORCH_CHECK(coalesced_, "ccl: endCoalescing without startCoalescing");
    return launch(std::move(coalesced_));
  }

  // ---- collectives

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto op = make(OpType::ALLREDUCE, "ccl:all_reduce", tensors, tensors, options.timeout);
    for (auto& tensor : tensors) add_allreduce(*op, tensor, options.reduceOp);
    return launch(op, options.asyncOp);
  }

  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return allreduce(tensors, options);  // refuses, with a message of ours
  }

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto op = make(OpType::BROADCAST, "ccl:broadcast", tensors, tensors, options.timeout);
    check_rank(*op, options.rootRank);
    add_broadcast(*op, output(*op, single(*op, tensors)), options.rootRank);
    return launch(op, options.asyncOp);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto op = make(OpType::REDUCE, "ccl:reduce", tensors, tensors, options.timeout);
    check_rank(*op, options.rootRank);
    auto& tensor = single(*op, tensors);
    const bool mine = rank_ == options.rootRank;
    auto buffer = mine ? output(*op, tensor) : input(*op, tensor);
    add_reduce(*op, buffer, buffer, options.reduceOp, options.rootRank);
    return launch(op, options.asyncOp);
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    auto op = make(OpType::ALLGATHER, "ccl:all_gather", inputs, flat(outputs), options.timeout);
    add_allgather(*op, single(*op, outputs), single(*op, inputs));
    return launch(op, options.asyncOp);
  }

  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override {
    auto op = make(OpType::ALLGATHER_COALESCED, "ccl:all_gather_coalesced", inputs, flat(outputs),
                   options.timeout);
    for (size_t i = 0; i < inputs.size(); ++i) {
      Tensors gathered;
      for (auto& list : outputs) gathered.push_back(list.at(i));
      add_allgather(*op, gathered, inputs[i]);
    }
    return launch(op, options.asyncOp);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, options);
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    auto op = make(OpType::_ALLGATHER_BASE, "ccl:all_gather_into_tensor", inputs, outputs,
                   options.timeout);
    check_count(*op, outputs.size(), inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_pair(*op, outputs[i], inputs[i], inputs[i].numel() * size_, outputs[i].numel());
      add_allgather(*op, split(*op, output(*op, outputs[i])), inputs[i]);
    }
    return launch(op, options.asyncOp);
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    auto op = make(OpType::REDUCE_SCATTER, "ccl:reduce_scatter", flat(inputs), outputs,
                   options.timeout);
    auto& shares = single(*op, inputs);
    auto& mine = single(*op, outputs);
    check_count(*op, shares.size(), size_);
    Tensors parts;
    for (auto& share : shares) {
      check_pair(*op, mine, share, mine.numel(), share.numel());
      parts.push_back(checked(*op, share).reshape({-1}));
    }
    add_reduce_scatter(*op, mine, input(*op, at::cat(parts)), options.reduceOp);
    return launch(op, options.asyncOp);
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    auto op = make(OpType::_REDUCE_SCATTER_BASE, "ccl:reduce_scatter_tensor", inputs, outputs,
                   options.timeout);
    check_count(*op, outputs.size(), inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_pair(*op, outputs[i], inputs[i], outputs[i].numel() * size_, inputs[i].numel());
      add_reduce_scatter(*op, outputs[i], input(*op, inputs[i]), options.reduceOp);
    }
    return launch(op, options.asyncOp);
  }

  WorkPtr alltoall_base(at::Tensor& output_tensor, at::Tensor& input_tensor,
                        std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override {
    auto op = make(OpType::ALLTOALL_BASE, "ccl:all_to_all_single", {input_tensor}, {output_tensor},
                   options.timeout);
    add_alltoall(*op, split(*op, input(*op, input_tensor), input_sizes),
                 split(*op, output(*op, output_tensor), output_sizes));
    return launch(op, options.asyncOp);
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override {
    auto op = make(OpType::ALLTOALL, "ccl:all_to_all", inputs, outputs, options.timeout);
    Tensors from, to;
    for (auto& tensor : inputs) from.push_back(input(*op, tensor));
    for (auto& tensor : outputs) to.push_back(output(*op, tensor));
    add_alltoall(*op, from, to);
    return launch(op, options.asyncOp);
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    auto op = make(OpType::GATHER, "ccl:gather", inputs, flat(outputs), options.timeout);
    check_rank(*op, options.rootRank);
    auto mine = input(*op, single(*op, inputs));
    if (rank_ == options.rootRank) {
      auto to = root_list(*op, single(*op, outputs), mine, output);
      for (int peer = 0; peer < size_; ++peer) add_recv(*op, to[peer], peer);
      to[rank_].copy_(mine.view_as(to[rank_]));
    } else {
      add_send(*op, mine, options.rootRank);
    }
    return launch(op, options.asyncOp);
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    auto op = make(OpType::SCATTER, "ccl:scatter", flat(inputs), outputs, options.timeout);
    check_rank(*op, options.rootRank);
    auto mine = output(*op, single(*op, outputs));
    if (rank_ == options.rootRank) {
      const auto from = root_list(*op, single(*op, inputs), mine, input);
      for (int peer = 0; peer < size_; ++peer) add_send(*op, from[peer], peer);
      mine.copy_(from[rank_].view_as(mine));
    } else {
      add_recv(*op, mine, options.rootRank);
    }
    return launch(op, options.asyncOp);
  }

  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    auto op = make(OpType::SEND, "ccl:send", tensors, tensors, c10d::kUnsetTimeout);
    check_peer(*op, peer, tag);
    add_send(*op, input(*op, single(*op, tensors)), peer);
    return launch(op);
  }

  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    auto op = make(OpType::RECV, "ccl:recv", tensors, tensors, c10d::kUnsetTimeout);
    check_peer(*op, peer, tag);
    add_recv(*op, output(*op, single(*op, tensors)), peer);
    return launch(op);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto op = make(OpType::BARRIER, "ccl:barrier", {}, {}, options.timeout);
    // oneCCL's own barrier blocks in the call, and has no limit
    auto token = at::zeros({1}, at::kInt);
    op->keep.push_back(token);
    op->calls.emplace_back([data = token.data_ptr()](auto& communicator) {
      return ccl::allreduce(data, data, 1, ccl::datatype::int32, ccl::reduction::sum, communicator);
    });
    return launch(op, options.asyncOp);
  }

  // Seconds for `repeats` bare calls of oneCCL, to measure what this backend adds to them.
  double bare_allreduce(const at::Tensor& tensor, int repeats) {
    auto op = make(OpType::ALLREDUCE, "ccl:bare_allreduce", {}, {}, c10d::kUnsetTimeout);
    const auto type = datatype_of(*op, tensor);
    std::lock_guard<std::mutex> lock(Engine::get().mutex_);
    const auto start = Clock::now();
    for (int i = 0; i < repeats; ++i) {
      ccl::allreduce(tensor.data_ptr(), tensor.data_ptr(), tensor.numel(), type,
                     ccl::reduction::sum, group_->communicator)
          .wait();
    }
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

 private:
  static ccl::communicator connect(c10d::Store& store, int rank, int size) {
    ccl::init();
    ccl::shared_ptr_class<ccl::kvs> kvs;
    if (rank == 0) {
      kvs = ccl::create_main_kvs();
      const auto address = kvs->get_address();
      store.set("ccl/address", std::vector<uint8_t>(address.begin(), address.end()));
    } else {
      const auto bytes = store.get("ccl/address");
      ccl::kvs::address_type address;
      TORCH_CHECK(bytes.size() == address.size(), "broken address in the store");
      std::copy(bytes.begin(), bytes.end(), address.begin());
      kvs = ccl::create_kvs(address);
    }
    return ccl::create_communicator(size, rank, kvs);
  }

  // ---- operations: made, filled, launched

  OperationPtr make(OpType type, const char* name, Tensors inputs, Tensors outputs,
                    milliseconds timeout) {
    TORCH_CHECK_WITH(DistBackendError, group_, name, " on rank ", rank_, ": the group is closed");
    if (timeout == c10d::kUnsetTimeout) timeout = timeout_;
    ++sequence_;
    return c10::make_intrusive<Operation>(group_, rank_, type, name, std::move(inputs),
                                          std::move(outputs), timeout);
  }

  WorkPtr launch(OperationPtr op, bool asynchronous = true) {
    if (!coalesced_) {
      Engine::get().submit(op, asynchronous);
      return op;
    }
    const auto append = [](auto& all, auto& more) {
      all.insert(all.end(), more.begin(), more.end());
    };
    append(coalesced_->calls, op->calls);
    append(coalesced_->finish, op->finish);
    append(coalesced_->keep, op->keep);
    append(coalesced_->outputs, op->outputs);
    return coalesced_;
  }

  // ---- checks

  template <typename T>
  static T& single(const Operation& op, std::vector<T>& list) {
    TORCH_CHECK_VALUE(list.size() == 1, op.title(), "one tensor a rank, got ", list.size());
    return list[0];
  }

  void check_rank(const Operation& op, int64_t rank) const {
    TORCH_CHECK_VALUE(0 <= rank && rank < size_, op.title(), "no rank ", rank, " in this group");
  }

  void check_peer(const Operation& op, int peer, int tag) const {
    check_rank(op, peer);
    TORCH_CHECK_VALUE(tag == 0, op.title(), "oneCCL has no tags, it matches messages in order: "
                      "leave the tag out");
  }

  static void check_count(const Operation& op, size_t count, size_t expected) {
    TORCH_CHECK_VALUE(count == expected, op.title(), count, " tensors, expected ", expected);
  }

  static void check_pair(const Operation& op, const at::Tensor& a, const at::Tensor& b,
                         int64_t expected, int64_t got) {
    TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), op.title(), "dtypes ", a.scalar_type(),
                     " and ", b.scalar_type(), " differ");
    TORCH_CHECK_VALUE(expected == got, op.title(), got, " elements, expected ", expected);
  }

  // Cuts a contiguous tensor along its first dimension into one part a rank: evenly, or as told.
  Tensors split(const Operation& op, const at::Tensor& buffer,
                const std::vector<int64_t>& sizes = {}) const {
    if (!sizes.empty()) {
      check_count(op, sizes.size(), size_);
      return buffer.split_with_sizes(sizes);
    }
    TORCH_CHECK_VALUE(buffer.numel() % size_ == 0, op.title(), buffer.numel(),
                      " elements can't be shared evenly by ", size_, " ranks");
    return buffer.reshape({-1}).split_with_sizes(
        std::vector<int64_t>(size_, buffer.numel() / size_));
  }

  template <typename Buffer>
  Tensors root_list(Operation& op, const Tensors& list, const at::Tensor& mine,
                    Buffer buffer) const {
    check_count(op, list.size(), size_);
    Tensors buffers;
    for (auto& tensor : list) {
      check_pair(op, tensor, mine, mine.numel(), tensor.numel());
      buffers.push_back(buffer(op, tensor));
    }
    return buffers;
  }

  // ---- the calls of oneCCL

  // First of all that is done at the end: copies come after it.
  void divide_if_average(Operation& op, const ReduceOp& how, const at::Tensor& buffer) const {
    if (how.op_ != ReduceOp::AVG) return;
    op.finish.insert(op.finish.begin(), [buffer, size = size_] { buffer.div_(size); });
  }

  void add_allreduce(Operation& op, const at::Tensor& tensor, const ReduceOp& how) {
    auto buffer = output(op, tensor);
    const auto type = datatype_of(op, buffer);
    const auto kind = reduction_of(op, how, buffer);
    each_piece(buffer, [&](size_t from, size_t count) {
      op.calls.emplace_back([=, data = address(buffer, from)](auto& communicator) {
        return ccl::allreduce(data, data, count, type, kind, communicator);
      });
    });
    divide_if_average(op, how, buffer);
  }

  void add_broadcast(Operation& op, const at::Tensor& buffer, int root) {
    const auto type = datatype_of(op, buffer);
    each_piece(buffer, [&](size_t from, size_t count) {
      op.calls.emplace_back([=, data = address(buffer, from)](auto& communicator) {
        return ccl::broadcast(data, count, type, root, communicator);
      });
    });
  }

  void add_reduce(Operation& op, const at::Tensor& from, const at::Tensor& result,
                  const ReduceOp& how, int root) {
    // oneCCL writes a result on every rank: elsewhere than at the root it goes to a spare buffer.
    auto to = rank_ == root ? result : at::empty_like(from);
    op.keep.push_back(to);
    const auto type = datatype_of(op, from);
    const auto kind = reduction_of(op, how, from);
    each_piece(from, [&](size_t start, size_t count) {
      op.calls.emplace_back(
          [=, source = address(from, start), data = address(to, start)](auto& communicator) {
            return ccl::reduce(source, data, count, type, kind, root, communicator);
          });
    });
    if (rank_ == root) divide_if_average(op, how, to);
  }

  void add_allgather(Operation& op, const Tensors& outputs, const at::Tensor& mine) {
    check_count(op, outputs.size(), size_);
    auto buffer = input(op, mine);
    const auto type = datatype_of(op, buffer);
    Tensors to;
    std::vector<void*> addresses;
    std::vector<size_t> counts;
    size_t bytes = 0;
    for (auto& tensor : outputs) {
      check_pair(op, tensor, mine, 0, 0);
      to.push_back(output(op, tensor));
      addresses.push_back(to.back().data_ptr());
      counts.push_back(tensor.numel());
      bytes += tensor.nbytes();
    }
    check_pair(op, outputs[rank_], mine, mine.numel(), outputs[rank_].numel());
    if (bytes > kMaxBytes) {  // too long for one call: each rank's part as a broadcast
      to[rank_].copy_(buffer.view_as(to[rank_]));
      for (int root = 0; root < size_; ++root) add_broadcast(op, to[root], root);
    } else if (bytes > 0) {
      op.calls.emplace_back([=](auto& communicator) {
        return ccl::allgatherv(buffer.data_ptr(), buffer.numel(), addresses, counts, type,
                               communicator);
      });
    }
  }

  // `shares` holds each rank's share, one after another.
  void add_reduce_scatter(Operation& op, const at::Tensor& mine, const at::Tensor& shares,
                          const ReduceOp& how) {
    auto result = output(op, mine);
    if (shares.nbytes() > kMaxBytes) {  // too long for one call: each rank's share as a reduce
      const auto parts = split(op, shares);
      for (int root = 0; root < size_; ++root) add_reduce(op, parts[root], result, how, root);
    } else if (shares.numel() > 0) {
      const auto type = datatype_of(op, shares);
      const auto kind = reduction_of(op, how, shares);
      op.calls.emplace_back([=](auto& communicator) {
        return ccl::reduce_scatter(shares.data_ptr(), result.data_ptr(), result.numel(), type,
                                   kind, communicator);
      });
      divide_if_average(op, how, result);
    }
  }

  // Messages between two ranks: oneCCL's own all-to-all wants one flat buffer, and has no gather
  // and no scatter. from[p] goes to rank p, to[p] comes from rank p.
  void add_alltoall(Operation& op, const Tensors& from, const Tensors& to) {
    check_count(op, from.size(), size_);
    check_count(op, to.size(), size_);
    check_pair(op, from[rank_], to[rank_], from[rank_].numel(), to[rank_].numel());
    for (int peer = 0; peer < size_; ++peer) {
      check_pair(op, from[peer], to[peer], 0, 0);
      add_send(op, from[peer], peer);
      add_recv(op, to[peer], peer);
    }
    to[rank_].copy_(from[rank_].view_as(to[rank_]));
  }

  void add_send(Operation& op, const at::Tensor& buffer, int peer) {
    if (peer == rank_) return;
    const auto type = datatype_of(op, buffer);
    each_piece(buffer, [&](size_t from, size_t count) {
      op.calls.emplace_back([=, data = address(buffer, from)](auto& communicator) {
        return ccl::send(data, count, type, peer, communicator);
      });
    });
  }

  void add_recv(Operation& op, const at::Tensor& buffer, int peer) {
    if (peer == rank_) return;
    const auto type = datatype_of(op, buffer);
    each_piece(buffer, [&](size_t from, size_t count) {
      op.calls.emplace_back([=, data = address(buffer, from)](auto& communicator) {
        return ccl::recv(data, count, type, peer, communicator);
      });
    });
  }

  const milliseconds timeout_;
  GroupPtr group_;
  OperationPtr coalesced_;
  std::atomic<uint64_t> sequence_{0};
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using Backend = c10::intrusive_ptr<c10d::Backend>;
  namespace py = pybind11;
  module.def(
      "create",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, milliseconds timeout) {
        return Backend(c10::make_intrusive<BackendCcl>(store, rank, size, timeout));
      },
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "bare_allreduce",
      [](const Backend& backend, const at::Tensor& tensor, int repeats) {
        return dynamic_cast<BackendCcl&>(*backend).bare_allreduce(tensor, repeats);
      },
      py::call_guard<py::gil_scoped_release>());
  module.def("unfinished", [](milliseconds limit) { return Engine::get().unfinished(limit); },
             py::call_guard<py::gil_scoped_release>());
  module.def("drain", [](milliseconds limit) { Engine::get().drain(limit); },
             py::call_guard<py::gil_scoped_release>());
  module.def("give_up", [] { Engine::get().give_up(); });
  module.def("oneccl_version", [] { return std::string(ccl::get_library_version().full); });
}
