package android.widget;

import android.view.View;

public abstract class AdapterView<A extends Adapter> extends View {
    public interface OnItemSelectedListener {
        void onItemSelected(AdapterView<?> parent, View view, int position, long id);
        void onNothingSelected(AdapterView<?> parent);
    }
    public final OnItemSelectedListener getOnItemSelectedListener() { throw new RuntimeException(); }
    public void setOnItemSelectedListener(OnItemSelectedListener listener) { throw new RuntimeException(); }
}
