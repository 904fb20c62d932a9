//! Fetches the published checkpoints of the tests into the cache folder, and prints the folder.

#![expect(clippy::print_stdout, reason = "its result is what it prints")]

fn main() -> qhx_base::Result<()> {
    let folder = qhx_tests::real::fetch_all()?;
    folder.iter().for_each(|folder| println!("{}", folder.display()));
    Ok(())
}
