//! Link options of the shared library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let os = std::env::var("CARGO_CFG_TARGET_OS").unwrap_or_default();
    let name = match os.as_str() {
        // The ABI's major version.
        "linux" => "libqhexrt.so.1",
        // Apps take a library by the name of its file.
        "android" => "libqhexrt.so",
        _ => return,
    };
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,{name}");
    // Threads of the library and of Qualcomm's outlive what a host may unload.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Crates that have a C interface of their own, as llguidance has, would export it from here.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs=ALL");
}
