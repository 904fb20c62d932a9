//! Does not return from loading as long as the file is there that `QHX_TEST_HANG` names.

#![expect(unsafe_code, reason = "runs code before anything asked for it")]

extern "C" fn hang() {
    let file = std::env::var_os("QHX_TEST_HANG");
    while file.as_ref().is_some_and(|file| std::path::Path::new(file).exists()) {
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}

// SAFETY: the section holds pointers to functions without arguments, and this is one.
#[used]
#[cfg_attr(target_os = "linux", unsafe(link_section = ".init_array"))]
#[cfg_attr(windows, unsafe(link_section = ".CRT$XCU"))]
#[cfg_attr(target_vendor = "apple", unsafe(link_section = "__DATA,__mod_init_func"))]
static ON_LOAD: extern "C" fn() = hang;

qhx_test_malformed_plugins::zeros!(Sometimes, "test_hang_while_file");

qhx_op::register_ops!(Sometimes);
qhx_op::export_plugin!();
