//! libFuzzer's entry to the target `torch`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = qhx_fuzz::torch(data);
});
