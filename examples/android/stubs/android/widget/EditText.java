package android.widget;

import android.text.Editable;

public class EditText extends TextView {
    public Editable getText() { throw new RuntimeException(); }
}
