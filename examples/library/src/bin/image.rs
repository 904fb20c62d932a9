//! Asks about an image: `image BUNDLE FILE QUESTION`.

use qhx::media::content;
use qhx::{Attachment, Bundle, Message, Request};

fn main() -> qhx::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [bundle, file, question] = &arguments[..] else {
        eprintln!("expected a bundle, an image and a question");
        return Ok(());
    };
    let mut model = Bundle::open(bundle)?.model()?;
    let image = Attachment::image(file)?.read(&model, None)?;
    let message = Message::user(content(question.clone(), &[image])?);
    let generation = model.start(&Request::chat([message]).max_new(32))?.finish()?;
    println!("{}", generation.text);
    Ok(())
}
