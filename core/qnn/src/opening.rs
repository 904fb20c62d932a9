//! Opens the contexts of a bundle: in which order, and how many at a time.

use std::sync::{Mutex, PoisonError};

use qhx_base::{Error, ErrorKind, Result};

use super::info::BinaryInfo;

/// Maximum contexts that are read and loaded at a time: each is a file whose pages are in memory meanwhile.
pub(crate) const MAX_CONCURRENT: usize = 4;

/// Bytes that the neediest graph of a binary wants for what does not fit the tightly coupled memory; 0
/// where the binary does not say.
pub(crate) fn spill_fill(info: &BinaryInfo) -> u64 {
    let graphs = info.graphs.iter();
    graphs.filter_map(|graph| graph.figures?.spill_fill_bytes).max().unwrap_or(0)
}

/// Which of several contexts is to have the buffer that all use, and how many bytes: the neediest, when
/// there is one and somebody to share with.
pub(crate) fn leader(needs: &[u64]) -> Option<(usize, u64)> {
    let (index, &bytes) = needs.iter().enumerate().max_by_key(|(_, bytes)| **bytes)?;
    (needs.len() > 1 && bytes > 0).then_some((index, bytes))
}

/// Does `work` with every item, some of them at a time. Answers in their order, or with the failure of
/// the first that failed; no further item is begun then.
pub(crate) fn side_by_side<T: Send, U: Send>(
    threads: usize,
    items: Vec<T>,
    work: impl Fn(T) -> Result<U> + Sync,
) -> Result<Vec<U>> {
    let threads = threads.min(items.len());
    if threads <= 1 {
        return items.into_iter().map(work).collect();
    }
    let mut results = Vec::new();
    results.resize_with(items.len(), || None);
    let (items, results) = (Mutex::new(Some(items.into_iter().enumerate())), Mutex::new(results));
    let next = || {
        let mut items = items.lock().unwrap_or_else(PoisonError::into_inner);
        items.as_mut().and_then(Iterator::next)
    };
    let run = || {
        while let Some((index, item)) = next() {
            let result = work(item);
            if result.is_err() {
                *items.lock().unwrap_or_else(PoisonError::into_inner) = None;
            }
            let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(slot) = results.get_mut(index) {
                *slot = Some(result);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // A thread that cannot be had leaves more to the others.
            let _ =
                std::thread::Builder::new().name("qhx-open".to_owned()).spawn_scoped(scope, run);
        }
        run();
    });
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut done = Vec::with_capacity(results.len());
    let mut missing = false;
    for result in results {
        match result {
            Some(result) => done.push(result?),
            None => missing = true,
        }
    }
    if missing {
        return Err(Error::new(ErrorKind::Internal, "a context was not opened"));
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn items_are_worked_on_at_once_and_results_keep_their_order() {
        let both = Barrier::new(2);
        let slow = |item: usize| {
            // Nobody passes alone.
            both.wait();
            Ok(item * 10)
        };
        assert_eq!(side_by_side(2, (0..6).collect(), slow).unwrap(), [0, 10, 20, 30, 40, 50]);
        assert!(side_by_side(4, Vec::<u8>::new(), Ok).unwrap().is_empty());
        let this = std::thread::current().id();
        let threads = side_by_side(1, vec![(); 3], |()| Ok(std::thread::current().id())).unwrap();
        assert_eq!(threads, [this; 3]);
    }

    #[test]
    fn the_first_failure_is_returned_and_stops_the_rest() {
        for threads in [1, 3] {
            let begun = AtomicUsize::new(0);
            let error = side_by_side(threads, (0..100).collect(), |item| {
                begun.fetch_add(1, Ordering::Relaxed);
                match item {
                    2.. => Err(Error::new(ErrorKind::Context, format!("item {item}"))),
                    _ => Ok(()),
                }
            });
            let error = error.unwrap_err();
            assert_eq!(error.message(), "item 2", "{threads} threads");
            assert!(begun.into_inner() <= 2 + threads, "{threads} threads");
        }
    }

    #[test]
    fn the_neediest_of_several_has_the_buffer() {
        assert_eq!(leader(&[3, 9, 5]), Some((1, 9)));
        assert_eq!(leader(&[9]), None);
        assert_eq!(leader(&[0, 0]), None);
        assert_eq!(leader(&[]), None);
    }
}
