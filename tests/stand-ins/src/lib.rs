//! Libraries that stand in for parts of a device where its processor is emulated (`qemu-aarch64`). Tests alone use
//! them.
//!
//! | example | stands in for |
//! |---|---|
//! | `cdsprpc` | `libcdsprpc.so` of the device's vendor, the way to the DSP, of which it is only the door |
//! | `exec` | the kernel of the device, which starts programs for its processor |
