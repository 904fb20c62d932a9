//! Link options of the library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let os = std::env::var("CARGO_CFG_TARGET_OS").unwrap_or_default();
    if !matches!(os.as_str(), "linux" | "android") {
        return;
    }
    // Apps take a library by the name of its file.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libqhxjni.so");
    // Threads of the library and of Qualcomm's outlive what a class loader may unload.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Crates that have a C interface of their own, as llguidance has, would export it from here.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs=ALL");
    // Android devices with pages of 16 KB refuse others.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,max-page-size=16384");
}
