//! Writes the bundle of `examples/plugin-template` again.

fn main() -> qhx_base::Result<()> {
    let template = qhx_tests::plugin_files::workspace().join("examples/plugin-template");
    qhx_tests::letters::write(&template.join("bundle"), |_| {})
}
