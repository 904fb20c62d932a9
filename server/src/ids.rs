//! Names of requests and answers.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Characters of a name that a client may give its request.
const MAX_ID: usize = 128;

/// A name that no other answer has: `prefix`, and 24 digits.
pub(crate) fn new(prefix: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    // Seeded by the system at random.
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u64(number);
    format!("{prefix}{:016x}{:08x}", hasher.finish(), number & 0xffff_ffff)
}

/// The name that a client gave its request, where that can stand in a log and in a header.
pub(crate) fn given(name: &str) -> Option<&str> {
    let plain = |c: u8| c.is_ascii_alphanumeric() || b"-_.".contains(&c);
    let good = !name.is_empty() && name.len() <= MAX_ID && name.bytes().all(plain);
    good.then_some(name)
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
