//! libFuzzer's entry to the target `plugins_lock`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = qhx_fuzz::plugins_lock(data);
});
