//! Never returns from loading.

#![expect(unsafe_code, reason = "runs code before anything asked for it")]

extern "C" fn hang() {
    loop {
        std::thread::sleep(std::time::Duration::from_secs(1));
    }
}

// SAFETY: the section holds pointers to functions without arguments, and this is one.
#[used]
#[cfg_attr(target_os = "linux", unsafe(link_section = ".init_array"))]
#[cfg_attr(windows, unsafe(link_section = ".CRT$XCU"))]
#[cfg_attr(target_vendor = "apple", unsafe(link_section = "__DATA,__mod_init_func"))]
static ON_LOAD: extern "C" fn() = hang;

qhx_test_malformed_plugins::zeros!(Never, "test_hang_on_load");

qhx_op::register_ops!(Never);
qhx_op::export_plugin!();
