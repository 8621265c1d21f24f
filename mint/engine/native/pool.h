// A few threads that share the pieces of one job after the other.
//
// A job is over when all of its pieces are, not when all threads have come by: on a busy machine a thread that the
// system has put aside holds up nobody, unless it was in the middle of a piece. Helpers sleep between steps and look
// out for the next job during one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
inline void pause() { __builtin_ia32_pause(); }
#else
inline void pause() {}
#endif

class Pool {
public:
    // For one step of one caller at a time; who finds it taken works alone. Helpers wake when there is something to
    // share, so a step with little to do wakes nobody.
    class Step {
    public:
        Step(Pool& pool, int64_t threads) : pool_(pool), threads_(threads) {}
        ~Step() {
            if (!held_) return;
            pool_.active_.store(0);
            pool_.owner_.unlock();
        }
        Step(const Step&) = delete;

        // Calls piece(0) ... piece(count - 1), in any order, on any of the threads.
        template <typename Piece>
        void share(int64_t count, bool worthwhile, const Piece& piece) {
            if (worthwhile && count > 1 && hold())
                pool_.share(count, piece);
            else
                for (int64_t i = 0; i < count; i++) piece(i);
        }

    private:
        bool hold() {
            if (!asked_ && threads_ > 1) {
                asked_ = true;
                held_ = pool_.owner_.try_lock();
                if (held_) pool_.wake(threads_ - 1);
            }
            return held_;
        }

        Pool& pool_;
        const int64_t threads_;
        bool asked_ = false, held_ = false;
    };

private:
    static constexpr int LOOKS = 2000;  // some tens of microseconds before others get a chance

    void wake(int64_t helpers) {
        std::lock_guard<std::mutex> lock(mutex_);
        while (int64_t(threads_) < helpers) {
            std::thread(&Pool::help, this, threads_++).detach();
        }
        active_.store(helpers);
        wanted_.notify_all();
    }

    void share(int64_t count, const std::function<void(int64_t)>& piece) {
        piece_ = &piece;
        done_.store(0, std::memory_order_relaxed);
        // The count is taken down together with the job's number, so that nobody takes a piece of one job for
        // another's.
        job_.store((++number_ << 32) | uint64_t(count), std::memory_order_release);
        while (take()) {}
        for (int looks = 0; done_.load(std::memory_order_acquire) < count; looks++)
            looks < LOOKS ? pause() : std::this_thread::yield();
    }

    bool take() {
        uint64_t job = job_.load(std::memory_order_acquire);
        do {
            if ((job & 0xffffffff) == 0) return false;
        } while (!job_.compare_exchange_weak(job, job - 1, std::memory_order_acq_rel, std::memory_order_acquire));
        (*piece_)(int64_t(job & 0xffffffff) - 1);
        done_.fetch_add(1, std::memory_order_release);
        return true;
    }

    void help(int64_t self) {
        for (;;) {
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wanted_.wait(lock, [&] { return self < active_.load(); });
            }
            for (int looks = 0; self < active_.load(std::memory_order_relaxed); looks++) {
                if (take())
                    looks = 0;
                else
                    looks < LOOKS ? pause() : std::this_thread::yield();
            }
        }
    }

    std::mutex owner_;
    std::mutex mutex_;
    std::condition_variable wanted_;
    std::atomic<int64_t> active_{0};
    int64_t threads_ = 0;
    std::atomic<uint64_t> job_{0};
    uint64_t number_ = 0;
    std::atomic<int64_t> done_{0};
    const std::function<void(int64_t)>* piece_ = nullptr;
};
