package android.widget;

import android.view.View;

public class ScrollView extends View {
    public boolean fullScroll(int direction) { throw new RuntimeException(); }
}
