//! Completes a text: `complete BUNDLE TEXT`.

fn main() -> qhx::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (bundle, text) =
        (arguments.next().unwrap_or_default(), arguments.next().unwrap_or_default());
    let mut model = qhx::Bundle::open(bundle)?.model()?;
    for piece in model.complete(text)? {
        print!("{}", piece?);
    }
    println!();
    Ok(())
}
