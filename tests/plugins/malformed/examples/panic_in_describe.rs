//! Panics when it is asked what it is, and what it throws panics when it is dropped.

#![expect(clippy::panic, reason = "panicking is what this plugin is for")]

struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        assert!(std::hint::black_box(false), "the bomb goes off");
    }
}

fn name() -> &'static str {
    if std::hint::black_box(true) {
        std::panic::panic_any(Bomb);
    }
    "never"
}

qhx_test_malformed_plugins::zeros!(Shy, name());

qhx_op::register_ops!(Shy);
qhx_op::export_plugin!();
