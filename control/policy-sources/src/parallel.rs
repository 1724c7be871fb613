//! Runs work on several threads and returns the results in order. An item whose work takes too long
//! is given up, so that it delays no other for longer. Start at [`map_within`].

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// The items, and the next of them that no thread has taken yet.
struct SharedItems<T, W> {
    items: Vec<T>,
    next: AtomicUsize,
    work: W,
}

/// What a thread reports of the item at an index.
enum ItemEvent<R> {
    Begun(usize),
    Done(usize, R),
}

/// Returns the result of `work` for each item, in the order of the items; `None` for an item whose
/// work takes longer than `timeout`. At most `workers` threads work at the same time, not counting
/// those whose item was given up: a thread cannot be stopped, and ends when its work does.
pub(crate) fn map_within<T, R, W>(
    items: Vec<T>,
    workers: usize,
    timeout: Duration,
    work: W,
) -> Vec<Option<R>>
where
    T: Send + Sync + 'static,
    R: Send + 'static,
    W: Fn(&T) -> R + Send + Sync + 'static,
{
    let mut results: Vec<Option<R>> = items.iter().map(|_| None).collect();
    let mut left = items.len();
    let next = AtomicUsize::new(0);
    let shared = Arc::new(SharedItems { items, next, work });
    let (sender, events) = mpsc::channel();
    // A thread without an item would have nothing to do; without any item, one thread does no harm.
    for _ in 0..workers.clamp(1, left.max(1)) {
        begin_worker(&shared, &sender);
    }
    // Items that are being worked on, with their deadlines, the earliest first.
    let mut begun: VecDeque<(usize, Instant)> = VecDeque::new();
    while left > 0 {
        let event = match begun.front() {
            Some((_, deadline)) => {
                events.recv_timeout(deadline.saturating_duration_since(Instant::now()))
            }
            // Some thread is between two items.
            None => events.recv().map_err(Into::into),
        };
        match event {
            Ok(ItemEvent::Begun(at)) => begun.push_back((at, Instant::now() + timeout)),
            Ok(ItemEvent::Done(at, result)) => {
                results[at] = Some(result);
                let before = begun.len();
                // An item that was given up is in the list no more, and was counted then.
                begun.retain(|(item, _)| *item != at);
                left -= before - begun.len();
            }
            // The deadline of the first item has passed: `sender` is held here, so the channel
            // stays open.
            Err(_) => {
                begun.pop_front();
                left -= 1;
                // The thread still works on the item that was given up.
                begin_worker(&shared, &sender);
            }
        }
    }
    results
}

/// Begins one more thread that takes items until none is left.
fn begin_worker<T, R, W>(shared: &Arc<SharedItems<T, W>>, events: &mpsc::Sender<ItemEvent<R>>)
where
    T: Send + Sync + 'static,
    R: Send + 'static,
    W: Fn(&T) -> R + Send + Sync + 'static,
{
    let (own, sender) = (shared.clone(), events.clone());
    let thread = std::thread::Builder::new().name("canal-start".into());
    // Without a further thread the caller's works, and then it cannot give up an item.
    if thread.spawn(move || run_worker(&own, &sender)).is_err() {
        run_worker(shared, events);
    }
}

fn run_worker<T, R, W: Fn(&T) -> R>(
    shared: &SharedItems<T, W>,
    events: &mpsc::Sender<ItemEvent<R>>,
) {
    loop {
        let at = shared.next.fetch_add(1, Relaxed);
        let Some(item) = shared.items.get(at) else {
            return;
        };
        // Nobody reads the events once all items are done or given up.
        let _ = events.send(ItemEvent::Begun(at));
        let result = (shared.work)(item);
        let _ = events.send(ItemEvent::Done(at, result));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Condvar, Mutex};

    use super::*;

    /// A time that no work in these tests takes unless it hangs.
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_slow_item_delays_no_other() {
        let done = Arc::new((Mutex::new(0), Condvar::new()));
        let work = move |item: &u32| {
            let (count, changed) = &*done;
            let mut count = count.lock().unwrap();
            if *item == 0 {
                // The first item waits for all others.
                let wait = changed.wait_timeout_while(count, LONG, |count| *count < 9);
                let (reached, waited) = wait.unwrap();
                drop(reached);
                assert!(!waited.timed_out(), "the others waited for the first");
            } else {
                *count += 1;
                changed.notify_all();
            }
            item * 2
        };
        let results = map_within((0..10).collect(), 2, 2 * LONG, work);
        let expected: Vec<_> = (0..10).map(|item| Some(item * 2)).collect();
        assert_eq!(results, expected);
    }

    #[test]
    fn an_item_that_takes_too_long_is_given_up() {
        let (end, ended) = mpsc::channel::<()>();
        let ended = Mutex::new(ended);
        let (worked, on_last) = mpsc::channel();
        // The only worker hangs at the first item, and another takes the rest.
        let work = move |item: &u32| match item {
            0 => drop(ended.lock().unwrap().recv()),
            9 => worked.send(()).unwrap(),
            _ => {}
        };
        let results = map_within((0..10).collect(), 1, Duration::from_secs(1), work);
        assert_eq!((results.len(), results[0]), (10, None));
        on_last.recv_timeout(LONG).unwrap();
        drop(end);
    }

    #[test]
    fn one_worker_is_enough() {
        let results = map_within(vec![3, 1, 2], 1, LONG, |item| item + 1);
        assert_eq!(results, [Some(4), Some(2), Some(3)]);
        assert!(map_within(Vec::<u8>::new(), 0, LONG, |item| *item).is_empty());
    }
}
