//! libFuzzer's entry to the target `npz`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = qhx_fuzz::npz(data);
});
