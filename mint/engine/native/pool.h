// Threads that share the pieces of one job after the other.
//
// A job is over when all of its pieces are, not when all threads have come by: on a busy machine a thread that the
// system has put aside holds up nobody, unless it was in the middle of a piece. Pieces are begun in their order. Helpers
// sleep between steps and look out for the next job during one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#if defined(__x86_64__) || defined(__i386__)
inline void pause() { __builtin_ia32_pause(); }
#else
inline void pause() {}
#endif

// Returns when `over` does: at first without giving others a chance, for some tens of microseconds.
template <typename Over>
inline void wait_until(const Over& over) {
    constexpr int LOOKS = 2000;
    for (int looks = 0; !over(); looks++) looks < LOOKS ? pause() : std::this_thread::yield();
}

class Pool {
public:
    // For one step, or one training pass, of one caller. Helpers wake when there is something to share, so a step with
    // little to do wakes nobody.
    class Step {
    public:
        explicit Step(int64_t threads) : threads_(threads) {}
        ~Step() {
            if (pool_) pool_->leave();
        }
        Step(const Step&) = delete;

        // Calls piece(0) ... piece(count - 1), on any of the threads.
        template <typename Piece>
        void share(int64_t count, bool worthwhile, const Piece& piece) {
            if (worthwhile && count > 1 && threads_ > 1) {
                if (!pool_) pool_ = &enter(threads_ - 1);
                pool_->share(count, piece);
            } else {
                for (int64_t i = 0; i < count; i++) piece(i);
            }
        }

    private:
        const int64_t threads_;
        Pool* pool_ = nullptr;
    };

    Pool() = default;

private:
    // A pool that nobody else has, with so many helpers awake. Pools are as many as there were callers at once, and live
    // as long as the process, as their threads do.
    static Pool& enter(int64_t helpers) {
        static std::mutex& mutex = *new std::mutex;
        static std::deque<Pool>& pools = *new std::deque<Pool>;
        std::lock_guard<std::mutex> lock(mutex);
        for (Pool& pool : pools)
            if (!pool.taken_.exchange(true)) return pool.wake(helpers);
        Pool& pool = pools.emplace_back();
        pool.taken_.store(true);
        return pool.wake(helpers);
    }

    void leave() {
        active_.store(0);
        taken_.store(false);
    }

    Pool& wake(int64_t helpers) {
        std::lock_guard<std::mutex> lock(mutex_);
        while (threads_ < helpers) std::thread(&Pool::help, this, threads_++).detach();
        active_.store(helpers);
        wanted_.notify_all();
        return *this;
    }

    void share(int64_t count, const std::function<void(int64_t)>& piece) {
        piece_ = &piece, count_ = count;
        done_.store(0, std::memory_order_relaxed);
        // The pieces that are left are taken down together with the job's number, so that nobody takes a piece of one
        // job for another's.
        job_.store((++number_ << 32) | uint64_t(count), std::memory_order_release);
        while (take()) {}
        wait_until([&] { return done_.load(std::memory_order_acquire) >= count; });
    }

    bool take() {
        uint64_t job = job_.load(std::memory_order_acquire);
        do {
            if ((job & 0xffffffff) == 0) return false;
        } while (!job_.compare_exchange_weak(job, job - 1, std::memory_order_acq_rel, std::memory_order_acquire));
        (*piece_)(count_ - int64_t(job & 0xffffffff));
        done_.fetch_add(1, std::memory_order_release);
        return true;
    }

    void help(int64_t self) {
        for (;;) {
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wanted_.wait(lock, [&] { return self < active_.load(); });
            }
            while (self < active_.load(std::memory_order_relaxed)) {
                bool took = false;
                wait_until([&] { return (took = take()) || self >= active_.load(std::memory_order_relaxed); });
            }
        }
    }

    std::atomic<bool> taken_{false};
    std::mutex mutex_;
    std::condition_variable wanted_;
    std::atomic<int64_t> active_{0};
    int64_t threads_ = 0;
    std::atomic<uint64_t> job_{0};
    uint64_t number_ = 0;
    std::atomic<int64_t> done_{0};
    const std::function<void(int64_t)>* piece_ = nullptr;
    int64_t count_ = 0;
};

// Lets pieces that are computed in any order add to a sum in theirs: each comes once, and waits for those before it.
class Turns {
public:
    void restart() { next_.store(0, std::memory_order_relaxed); }

    template <typename Work>
    void take(int64_t number, const Work& work) {
        wait_until([&] { return next_.load(std::memory_order_acquire) == number; });
        work();
        next_.store(number + 1, std::memory_order_release);
    }

    void pass(int64_t number) {
        take(number, [] {});
    }

private:
    std::atomic<int64_t> next_{0};
};
