package android.widget;

import android.content.Context;
import java.util.List;

public class ArrayAdapter<E> implements SpinnerAdapter {
    public ArrayAdapter(Context context, int resource, List<E> objects) { throw new RuntimeException(); }
}
